"""What the ranks agree on in an optimizer's first step, so that all cut the same buckets.

Ranks must give buckets the same names and reduce them in the same way, whatever differs between
their machines and environments and whatever else each of them has done before. Each makes a
proposal, and `agree` makes the same `Agreement` of all proposals on all ranks. Used by
`horovod.torch.gradients.plan`. What steps show later is compared by `StepSamples` and, for the
times of `horovod.torch.gradients.autotune`, by `greatest`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from horovod.common.config import chosen_knobs
from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import Max
from horovod.common.topology import Topology
from horovod.engine.arguments import set_id, set_size
from horovod.engine.autotune import TunedSet
from horovod.engine.runtime import runtime
from horovod.torch.ops.allreduce import allreduce_

# Knobs that measured times may decide, unless the user has set them.
TUNABLE = (
    "overlap_backward",
    "fusion_threshold",
    "cycle_time",
    "shm_peer_memory",
    "hierarchical_allreduce",
)

_num_named = 0  # the next optimizer's number: smaller ones are taken


# For these fields the least of all proposals counts (for a flag: have all ranks set it?), for the
# others the greatest (has any rank?).
_LEAST = frozenset({"overlap", "direct", "spare_cores", "fusion_threshold", "autotune"})


@dataclass(frozen=True)
class Agreement:
    """What a rank proposes, and then what all ranks go by."""

    number: int  # number of the optimizer, for its name
    overlap: bool  # whether gradients can be reduced while backward goes on
    direct: bool  # whether all gradients can be reduced without asking: see `direct_reducer`
    spare_cores: bool  # whether a thread beside backward has a core to run on
    fusion_threshold: int
    autotune: bool
    num_warmup: int  # samples that HOROVOD_AUTOTUNE drops, steps of a sample, and so on
    num_steps: int
    most_samples: int
    fixed: frozenset[str]  # those of TUNABLE that the user has set
    order: tuple[int, ...]  # indices of parameters; only the first rank proposes an order
    sparse_dims: tuple[int, ...]  # sparse dimensions of each parameter's gradient; 0: it is dense

    def numbers(self) -> list[int]:
        """Return the proposal as numbers, of each of which the greatest counts."""
        return [
            -number if name in _LEAST else number
            for name, value in vars(self).items()
            for number in _numbers(value)
        ]

    def outcome(self, numbers: Sequence[float]) -> Agreement:
        """Return the agreement that has `numbers`, the greatest of all proposals."""
        rest = iter(numbers)
        found: dict[str, Any] = {}
        for name, proposed in vars(self).items():
            theirs = [int(next(rest)) for _ in _numbers(proposed)]
            if isinstance(proposed, frozenset):
                found[name] = frozenset(itertools.compress(TUNABLE, theirs))
            elif isinstance(proposed, tuple):
                found[name] = tuple(theirs)
            else:
                found[name] = type(proposed)(-theirs[0] if name in _LEAST else theirs[0])
        return Agreement(**found)


def _numbers(value: Any) -> Sequence[int]:
    if isinstance(value, frozenset):
        return [knob in value for knob in TUNABLE]
    return value if isinstance(value, tuple) else (value,)


def propose(
    overlap: bool, direct: bool, arrivals: Sequence[int], sparse_dims: Sequence[int]
) -> Agreement:
    """Return what this rank proposes.

    `arrivals` are the parameters whose gradients have come, in order; `sparse_dims` has a number
    for every parameter.
    """
    config = runtime.config
    return Agreement(
        number=_num_named,
        overlap=overlap,
        direct=direct and not any(sparse_dims),
        spare_cores=has_spare_core(runtime.topology),
        fusion_threshold=config.fusion_threshold,
        autotune=config.autotune,
        num_warmup=config.autotune_warmup_samples,
        num_steps=config.autotune_steps_per_sample,
        most_samples=config.autotune_bayes_opt_max_samples,
        fixed=chosen_knobs().intersection(TUNABLE),
        order=tuple(order_of(arrivals, len(sparse_dims))),
        sparse_dims=tuple(sparse_dims),
    )


def agree(proposal: Agreement, process_set: ProcessSet) -> tuple[Agreement, bool]:
    """Return what the ranks agree on, and whether all of them have made a proposal.

    If one has joined instead, it holds for one step: that rank could not know of it later.
    """
    global _num_named
    num_params = len(proposal.order)
    if process_set.rank() != 0:
        proposal = replace(proposal, order=(0,) * num_params)
    # Ranks call this in the order of their steps, so one name does for all optimizers.
    name = "DistributedOptimizer.agreement"
    numbers, present = greatest(proposal.numbers(), process_set, name)
    agreed = proposal.outcome(numbers)
    if not present[0]:
        agreed = replace(agreed, order=tuple(order_of((), num_params)))
    _num_named = agreed.number + 1
    return agreed, all(present)


def greatest(
    mine: Sequence[float], process_set: ProcessSet, name: str = "DistributedOptimizer.autotune"
) -> tuple[list[float], list[bool]]:
    """Return the greatest of each number over all ranks, and which ranks brought theirs.

    A rank that has joined brings none. Collective, in the same step on all ranks.
    """
    own_rank, size = process_set.rank(), set_size(process_set)
    brought = [float(rank == own_rank) for rank in range(size)]
    vector = torch.tensor([*mine, *brought], dtype=torch.float64)
    found = allreduce_(vector, name=name, op=Max, process_set=process_set).tolist()
    return found[: len(mine)], [value > 0 for value in found[len(mine) :]]


class StepSamples:
    """Numbers that each step shows on this rank, which all ranks look at together after some steps.

    Args:
        num_steps: Number of steps after which the ranks look.
        process_set: The ranks that compare their numbers.
    """

    def __init__(self, num_steps: int, process_set: ProcessSet) -> None:
        self._num_steps = num_steps
        self._process_set = process_set
        self._set: TunedSet = runtime.tuned_set(set_id(process_set))
        self._joins = self._set.num_joins
        self._steps: list[Callable[[], Sequence[float]]] = []

    def add_for_least(self, shown: Callable[[], Sequence[float]]) -> list[float] | None:
        """Add what a step has shown. After enough steps, return the least of each number.

        It is the least of all steps and ranks, so the call is collective then. Only then `shown` is
        called; it may wait for a device. Returns None before, and while a rank has joined, because
        that rank could not know the outcome.
        """
        found = self._agree(shown, lambda values: -min(values))
        return None if found is None else [-value for value in found]

    def add_for_median(self, shown: Callable[[], Sequence[float]]) -> list[float] | None:
        """Do the same, but return each number's median of the steps on the slowest rank."""
        return self._agree(shown, median)

    def _agree(
        self,
        shown: Callable[[], Sequence[float]],
        summary: Callable[[Sequence[float]], float],
    ) -> list[float] | None:
        """Add a step; after enough, return the greatest of the ranks' summaries of each number."""
        if self._joins != self._set.num_joins:  # those that joined early made fewer steps
            self._joins = self._set.num_joins
            self._steps.clear()
        self._steps.append(shown)
        if len(self._steps) < self._num_steps:
            return None
        samples = [shown() for shown in self._steps]
        mine = [summary(values) for values in zip(*samples, strict=True)]
        self._steps.clear()
        found, present = greatest(mine, self._process_set)
        return list(found) if all(present) else None


def order_of(arrivals: Sequence[int], num_params: int) -> Iterator[int]:
    """Yield all parameters: first as their gradients arrived, then the others from the last on."""
    seen = dict.fromkeys(arrivals)
    yield from seen
    yield from (index for index in reversed(range(num_params)) if index not in seen)


def has_spare_core(topology: Topology) -> bool:
    """Return whether a thread beside backward has a core to run on."""
    available = len(os.sched_getaffinity(0)) // topology.local_size
    return available > torch.get_num_threads()
