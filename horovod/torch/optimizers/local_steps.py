"""LocalSteps: what a user has asked for with DistributedOptimizer(local_steps=...), and its checks.

Made by `horovod.torch.optimizer`, checked by all ranks together
(`horovod.torch.optimizers.checks`), and carried out by `horovod.torch.optimizers.local`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from horovod.common.host import host_name
from horovod.common.local_steps import LocalSchedule, check_count
from horovod.common.process_sets import ProcessSet, shared_process_set
from horovod.engine.arguments import set_id
from horovod.engine.runtime import runtime
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.dtensors import is_dtensor
from horovod.torch.ops.objects import allgather_object

HOST: Final = "host"  # for `within`: the ranks of a host are a cluster


@dataclass(frozen=True)
class LocalSteps(LocalSchedule):
    """Arguments of DistributedOptimizer that say when and how local steps are synchronised."""

    average_buffers: torch.nn.Module | None = None
    fragments: int = 1
    delay: int = 0
    alpha: float | None = None
    within: ProcessSet | Literal["host"] | None = None

    @property
    def local_share(self) -> float:
        """What remains of a rank's own parameters in a synchronisation."""
        return (0.5 if self.delay else 0.0) if self.alpha is None else self.alpha

    def settings(self) -> dict[str, str]:
        """What must be equal on all ranks, by the names of the arguments."""
        shown = super().settings()
        shown["average_buffers"] = str(self.average_buffers is not None)
        if isinstance(self.within, ProcessSet):
            shown["within"] = "a process set"  # each rank has one of its own
        return shown


def check_local_steps(chosen: LocalSteps, named: list[Named]) -> None:
    """Refuse local steps that make no sense, or not with these parameters."""
    if not chosen.check():
        return
    _check_numbers(chosen)
    _check_kinds(chosen)
    for name, param in named:
        if is_dtensor(param):
            raise ValueError(
                f"local_steps does not go with parameter {name!r}, a DTensor: leave local_steps out"
            )
        if not param.is_floating_point():
            raise ValueError(
                f"local_steps averages real numbers, and parameter {name!r} is {param.dtype}"
            )
    num_layers = len(layers(named))
    if chosen.fragments > num_layers:
        raise ValueError(
            f"fragments must not exceed the number of layers, {num_layers}, "
            f"and is {chosen.fragments}"
        )


def _check_numbers(chosen: LocalSteps) -> None:
    check_count("fragments", chosen.fragments, 1)
    check_count("delay", chosen.delay, 0)
    if chosen.fragments > chosen.steps:
        raise ValueError(
            f"fragments={chosen.fragments} must not exceed local_steps={chosen.steps}: in each "
            f"step one fragment at most begins to be synchronised"
        )
    if chosen.delay >= chosen.steps:
        raise ValueError(
            f"delay={chosen.delay} must be less than local_steps={chosen.steps}: a fragment must "
            f"have arrived before it is sent again"
        )
    alpha: Any = chosen.alpha
    if alpha is not None:
        if not isinstance(alpha, (int, float)) or not 0 <= alpha < 1:
            raise ValueError(f"alpha must be at least 0 and less than 1, not {alpha!r}")
        if not chosen.delay:
            raise ValueError("alpha needs delay: without it there are no later steps to mix in")


def _check_kinds(chosen: LocalSteps) -> None:
    model: Any = chosen.average_buffers
    within: Any = chosen.within
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"average_buffers must be the model, a torch.nn.Module, not {type(model).__name__}"
        )
    if within == HOST:
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
    """The process set of the ranks on this rank's host. Collective over all ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(allgather_object(host_name(), "local_steps.hosts")):
        ranks.setdefault(name, []).append(rank)
    sets = {name: shared_process_set(members) for name, members in ranks.items()}
    return sets[host_name()]


def layers(named: list[Named]) -> list[list[Named]]:
    """The parameters by the module that they belong to, in the order of the modules.

    A parameter whose name has no module, or that has no name, is a layer of its own.
    """
    found: dict[str, list[Named]] = {}
    for name, param in named:
        module = name.rpartition(".")[0]
        key = name if not module or name.startswith("allreduce.noname.") else module
        found.setdefault(key, []).append((name, param))
    return list(found.values())
