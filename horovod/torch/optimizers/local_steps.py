"""LocalSteps: what a user has asked for with DistributedOptimizer(local_steps=...), and its checks.

Made by `horovod.torch.optimizer`, checked by all ranks together
(`horovod.torch.optimizers.checks`), and carried out by `horovod.torch.optimizers.local`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from horovod.common.host import host_name
from horovod.common.local_steps import HOST, LocalSchedule, divide
from horovod.common.process_sets import ProcessSet, global_process_set, shared_process_set
from horovod.engine.arguments import set_id
from horovod.engine.runtime import runtime
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.dtensors import is_dtensor
from horovod.torch.ops.objects import allgather_object


@dataclass(frozen=True)
class LocalSteps(LocalSchedule):
    """Arguments of DistributedOptimizer that say when and how local steps are synchronised."""

    average_buffers: torch.nn.Module | None = None

    def settings(self) -> dict[str, str]:
        """Return what must be equal on all ranks, by the names of the arguments."""
        shown = super().settings()
        shown["average_buffers"] = str(self.average_buffers is not None)
        return shown


NO_LOCAL_STEPS = LocalSteps()


def check_local_steps(chosen: LocalSteps, named: list[Named], process_set: ProcessSet) -> None:
    """Refuse local steps that make no sense, or not with these parameters."""
    if chosen.local_steps is None:
        return
    model: Any = chosen.average_buffers
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"average_buffers must be the model, a torch.nn.Module, not {type(model).__name__}"
        )
    check_within(chosen.within, process_set)
    for name, param in named:
        if is_dtensor(param):
            raise ValueError(
                f"local_steps does not go with parameter {name!r}, a DTensor: leave local_steps out"
            )
        if not param.is_floating_point():
            raise ValueError(
                f"local_steps averages real numbers, and parameter {name!r} is {param.dtype}"
            )
    sizes = [param.numel() for _, param in named]
    divide([name for name, _ in named], sizes, chosen.fragments)  # raises if there are fewer layers


def check_within(within: Any, process_set: ProcessSet) -> None:
    """Refuse a `within` that is no cluster of this rank; `process_set` are the ranks that train.

    Bindings for other frameworks call it too.
    """
    if within == HOST:
        if process_set is not global_process_set:
            raise ValueError('within="host" works with all ranks: leave process_set out')
        if runtime.config.elastic:
            raise ValueError(
                'within="host" does not work in elastic jobs, in which hosts come and go: leave '
                "within out"
            )
    elif within is not None:
        if not isinstance(within, ProcessSet):
            raise ValueError(
                f"within must be the hvd.ProcessSet of this rank's cluster or {HOST!r}, "
                f"not {within!r}"
            )
        set_id(within)  # an unregistered one is refused
        if not within.included():
            raise ValueError(
                f"within must be a set that this rank belongs to, and its ranks are {within.ranks}"
            )


def set_of_this_host() -> ProcessSet:
    """Return the process set of the ranks on this rank's host. Collective over all ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(allgather_object(host_name(), "local_steps.hosts")):
        ranks.setdefault(name, []).append(rank)
    sets = {name: shared_process_set(members) for name, members in ranks.items()}
    return sets[host_name()]
