"""Decide which ranks are slow and why, for the live page and for reports, in pure functions.

In synchronous training all ranks have the same step time, so ranks are compared by how long each
computes in a step. In every step some rank is the last: that one of two ranks was the last in 41 of
77 steps says nothing. Ranks are slow if

- one of them is the last more often than chance explains,
- they compute longer than the others by a share of the step that is worth mentioning; medians are
  compared, which a few long steps do not move,
- and they do so in most stretches of the time, not only while something else ran on their cores.

`losses` applies them to a recording, `horovod.observe.dashboard.stragglers` to the last steps of a
running job. Links are compared in the same way, by how long each rank reduces.

Where ranks outnumber the cores of their host they take turns, and the times of single ranks say
little: `find_crowded` finds such hosts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from horovod.observe.reports.amounts import count_of

CHANCE = 1e-3  # the largest probability with which chance may explain what counts as a finding
_STRETCHES = 4  # into which the steps are cut; the ranks must be slow in all but one of them
_FEWEST_STEPS = 4  # steps in a stretch
_NAMED_HOSTS = 3

BACKWARD, COMPUTE, LINK = "backward", "compute", "link"
WHERE_TO_LOOK = {
    BACKWARD: "Look at the cores or the GPU there (other programs, clock, temperature, "
    "OMP_NUM_THREADS) and at the sizes of batches",
    COMPUTE: "Look at data loading there first (loader workers, slow disk, longer samples), then "
    "at forward",
    LINK: "Look at the network there: another interface (--network-interfaces), other traffic, "
    "cables; compression=hvd.Compression.bf16 halves the bytes",
}
"""What a person may try, by the part of a step in which a rank is slow."""


@dataclass(frozen=True)
class Sensitivity:
    """The least difference between slow ranks and others that means something."""

    share: float  # a share of the step
    seconds: float = 0.0  # differences up to this one come from timers and schedulers

    def least_gap(self, step: float) -> float:
        """Return the least gap that counts, given the seconds of a step."""
        return max(self.seconds, self.share * step)


RECORDED = Sensitivity(0.05)  # a recording tells how long a rank had no core, and that is taken off
LIVE = Sensitivity(0.10, 0.002)
CROWDED = Sensitivity(0.30, 0.002)  # ranks outnumber cores: one that waits for its turn is not slow


@dataclass(frozen=True)
class SlowRanks:
    """The ranks that are slow, and by how much."""

    ranks: tuple[int, ...]
    times_last: int  # the number of steps in which one of them was the last
    num_steps: int
    excess: float  # their median time to compute, minus that of the others
    cost: float  # how much shorter a step would be, on average, if they were like the others


def find_slow_ranks(times: Mapping[int, Sequence[float]], least_gap: float) -> SlowRanks | None:
    """Find the ranks that hold all others up.

    Args:
        times: How long each rank computed, in the same steps, in any unit.
        least_gap: The least gap between slow ranks and others that counts, in that unit.

    Returns:
        The slow ranks, at most half of all; None if no rank is slow.
    """
    num_steps = min((len(values) for values in times.values()), default=0)
    if len(times) < 2 or not num_steps:
        return None
    middles = {rank: median(values) for rank, values in times.items()}
    order = sorted(times, key=middles.__getitem__)
    medians = [middles[rank] for rank in order]
    gaps = [later - earlier for earlier, later in pairwise(medians)]
    half = len(order) - len(order) // 2
    # The slow ranks begin after the widest gap in the upper half.
    first = max(range(half, len(order)), key=lambda index: gaps[index - 1])
    slow, others = order[first:], order[:first]
    # How far, in each step, the fastest of the slow ranks is behind the slowest of the others.
    gaps_of_steps = [
        own - other for own, other in zip(times[slow[0]], times[others[-1]], strict=True)
    ]
    gap = median(gaps_of_steps)
    if gap < least_gap or not _is_lasting(gaps_of_steps, gap):
        return None
    ahead = [max(values) for values in zip(*(times[rank] for rank in others), strict=True)]
    last = [max(values) for values in zip(*(times[rank] for rank in slow), strict=True)]
    times_last = sum(own > other for own, other in zip(last, ahead, strict=True))
    # Times the number of ranks, because chance could have picked any of them.
    if len(order) * chance_of(times_last, num_steps, len(slow) / len(order)) > CHANCE:
        return None
    cost = fmean(max(0.0, own - other) for own, other in zip(last, ahead, strict=True))
    excess = median(medians[first:]) - median(medians[:first])
    return SlowRanks(tuple(sorted(slow)), times_last, num_steps, excess, cost)


def cause_of(excess: float, excess_in_backward: float) -> str:
    """Return where a slow rank loses most of its excess time: BACKWARD, or COMPUTE before it."""
    return BACKWARD if excess_in_backward > excess / 2 else COMPUTE


def chance_of(times: int, tries: int, probability: float) -> float:
    """Bound the probability that something happens at least `times` in `tries` (Chernoff)."""
    share = times / tries if tries else 0.0
    if share <= probability:
        return 1.0
    distance = share * math.log(share / probability)
    if share < 1:
        distance += (1 - share) * math.log((1 - share) / (1 - probability))
    return math.exp(-tries * distance)


def _is_lasting(gaps: Sequence[float], gap: float) -> bool:
    """Return whether the gap is there in most stretches of the steps."""
    count = min(_STRETCHES, len(gaps) // _FEWEST_STEPS)
    if count < 2:
        return True
    bounds = [len(gaps) * index // count for index in range(count + 1)]
    there = [median(gaps[first:last]) > gap / 2 for first, last in pairwise(bounds)]
    return sum(there) >= max(2, count - 1)


# -- ranks that outnumber the cores of their host ------------------------------------------------


class HostLoad(NamedTuple):
    """The number of ranks on a host, and of the cores that they may use together."""

    host: str
    ranks: int
    cores: int


def count_ranks_and_cores(
    hosts: Mapping[int, str], cores: Mapping[int, frozenset[int]]
) -> list[HostLoad]:
    """Count the ranks of each host, and the cores that they may use.

    Args:
        hosts: The host of each rank.
        cores: The numbers of the cores that each rank may use, if known. A host counts only if
            those of all its ranks are known, as each may be bound to a core of its own.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        ranks_of.setdefault(host, []).append(rank)
    return [
        HostLoad(host, len(ranks), len(frozenset().union(*(cores[rank] for rank in ranks))))
        for host, ranks in ranks_of.items()
        if all(cores.get(rank) for rank in ranks)
    ]


def find_crowded(hosts: Mapping[int, str], cores: Mapping[int, frozenset[int]]) -> list[HostLoad]:
    """Return the hosts with more ranks than cores; arguments as in `count_ranks_and_cores`."""
    return [each for each in count_ranks_and_cores(hosts, cores) if each.ranks > each.cores]


def describe_crowded(crowded: Sequence[HostLoad], num_hosts: int) -> str:
    """Return one sentence about all crowded hosts; empty if there is none."""
    if not crowded:
        return ""
    names = [each.host for each in crowded]
    alike = {f"{each.ranks} ranks share {count_of(each.cores, 'core')}" for each in crowded}
    if len(alike) == 1:
        (many,) = alike
        if num_hosts == 1:
            return many
        if len(names) > _NAMED_HOSTS:
            return f"{many} on each of {len(names)} hosts"
        return f"{many} on {', '.join(names)}"
    shown = ", ".join(describe_crowded([each], 2) for each in crowded[:_NAMED_HOSTS])
    more = len(crowded) - _NAMED_HOSTS
    return f"{shown}, and {more} more hosts are alike" if more > 0 else shown
