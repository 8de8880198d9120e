"""Cut one rank's time into steps, and each step into its parts. `analysis` uses this.

Every moment of a step of a rank is one of four things:

- compute: the program runs, and hides what collectives do meanwhile. Data loading, the optimizer's
  update and everything else that the program does count as well;
- wait: the program waits for results, and a rank has not yet submitted a collective that is pending
  here. If other collectives run meanwhile, that rank's delay hides them;
- reduction: it waits, all ranks have submitted, and a collective moves and reduces data;
- negotiation: it waits, all ranks have submitted, and they have not agreed yet.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from statistics import median

from horovod.observe.timeline.matching import Match
from horovod.observe.timeline.recording import Recording, TimeSpan

PARTS = ("compute", "negotiation", "wait", "reduction")


@dataclass(frozen=True)
class Split:
    """One rank's part of one step, in microseconds."""

    duration: float
    negotiation: float
    wait: float
    reduction: float
    hidden: float = 0.0  # reductions behind compute, here or on a rank that is late
    before_backward: float | None = None  # until the first gradient: update, data loading, forward
    backward: float | None = None  # from the first gradient until the program waits for them
    starved: float | None = None  # the thread wanted a core and had none; None where unknown
    blocked: float | None = None  # compute in which it neither ran nor wanted a core, at least

    @property
    def compute(self) -> float:
        """What remains of the step."""
        return max(0.0, self.duration - self.negotiation - self.wait - self.reduction)

    @property
    def starved_computing(self) -> float:
        """The part of `starved` in compute, if it is spread evenly over all but the wait."""
        busy = self.duration - self.wait
        return min(self.compute, (self.starved or 0.0) * self.compute / busy) if busy > 0 else 0.0

    def part(self, name: str) -> float:
        """Return the field or property with this name."""
        value: float = getattr(self, name)
        return value


@dataclass(frozen=True)
class StepSplit:
    """One step on all ranks."""

    number: int
    began: float
    ranks: dict[int, Split]
    slowest: int | None  # the rank that the others waited for; None if no rank was late
    lateness: float  # how much later it came than the others
    # How long, in microseconds, each rank without a file took to submit all of the step.
    arrivals: dict[int, float] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        """The median over the ranks."""
        return median(split.duration for split in self.ranks.values())

    @property
    def computes(self) -> dict[int, float]:
        """How long each rank computed; of ranks without a file, how long they took to submit."""
        return self.arrivals | {rank: split.compute for rank, split in self.ranks.items()}

    @property
    def starved(self) -> dict[int, float]:
        """How long each rank had no core while it computed; 0 where unknown."""
        known = {rank: split.starved_computing for rank, split in self.ranks.items()}
        return dict.fromkeys(self.arrivals, 0.0) | known


class RankTimes:
    """The times at which one rank did what; `split` cuts them into steps."""

    def __init__(self, recording: Recording, matches: Sequence[Match]) -> None:
        rank = recording.rank
        executing: list[Stretch] = []
        waiting: list[Stretch] = []
        negotiating: list[Stretch] = []
        for each in matches:
            part = each.parts.get(rank)
            if part is None or part.agreed is None:
                continue
            ended = part.ended or recording.ended
            last = part.agreed
            if each.last_ready is not None:
                # A device waits for other ranks inside of a collective that had no agreement.
                latest = ended if part.is_direct else part.agreed
                last = min(max(each.last_ready, part.submitted), latest)
            waiting.append((part.submitted, last))
            negotiating.append((last, part.agreed))
            if part.started is not None:
                executing.append((max(part.started, last), ended))
        unmatched = [c for c in recording.collectives if c.agreed is None]
        waiting += [(c.submitted, recording.ended) for c in unmatched if c.started is None]
        self.executing = union(executing)
        if recording.version >= 2:
            self.exposed = union((span.began, span.ended) for span in recording.waits)
        else:  # the file does not tell when the program waited: take all collectives as waited for
            self.exposed = union([*executing, *waiting, *negotiating])
        self.wait = intersection(self.exposed, union(waiting))
        rest = difference(self.exposed, union(waiting))
        self.reduction = intersection(rest, self.executing)
        rest = difference(rest, self.executing)
        self.negotiation = intersection(rest, union(negotiating))
        self.backwards = [span for spans in recording.backwards.values() for span in spans]
        self.backwards.sort(key=lambda span: span.ended)

    def split(self, span: TimeSpan) -> Split:
        """Return the parts of the step that `span` is."""
        began, ended = span.began, span.ended
        reduction = length(clip(self.reduction, began, ended))
        exposed = length(clip(self.exposed, began, ended))
        backward = self._backward(span)
        before = blocked = None
        if backward is not None:
            before = backward.began - began - length(clip(self.exposed, began, backward.began))
        if span.ran is not None and span.starved is not None:
            blocked = max(0.0, ended - began - exposed - span.ran - span.starved)
        return Split(
            duration=ended - began,
            negotiation=length(clip(self.negotiation, began, ended)),
            wait=length(clip(self.wait, began, ended)),
            reduction=reduction,
            hidden=length(clip(self.executing, began, ended)) - reduction,
            before_backward=before,
            backward=None if backward is None else backward.ended - backward.began,
            starved=span.starved,
            blocked=blocked,
        )

    def _backward(self, step: TimeSpan) -> TimeSpan | None:
        """Return the last backward pass inside a step, if there is one."""
        index = bisect_right(self.backwards, step.ended, key=lambda span: span.ended) - 1
        last = self.backwards[index] if index >= 0 else None
        return last if last is not None and last.began >= step.began else None


# -- sets of times: sorted lists of stretches that do not touch --------------------------------

Stretch = tuple[float, float]


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return the times that are in any stretch; empty and reversed stretches do not count."""
    joined: list[Stretch] = []
    for began, ended in sorted(stretch for stretch in stretches if stretch[0] < stretch[1]):
        if joined and began <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        else:
            joined.append((began, ended))
    return joined


def intersection(one: Sequence[Stretch], other: Sequence[Stretch]) -> list[Stretch]:
    """Return the times that are in both."""
    common, left, right = [], 0, 0
    while left < len(one) and right < len(other):
        began = max(one[left][0], other[right][0])
        ended = min(one[left][1], other[right][1])
        if began < ended:
            common.append((began, ended))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return common


def difference(one: Sequence[Stretch], other: Sequence[Stretch]) -> list[Stretch]:
    """Return the times that are in the first and not in the second."""
    edges = [-inf, *chain.from_iterable(other), inf]
    return intersection(one, list(zip(edges[::2], edges[1::2], strict=True)))


def clip(stretches: Sequence[Stretch], began: float, ended: float) -> list[Stretch]:
    """Return the times that lie between `began` and `ended`."""
    first = bisect_right(stretches, began, key=lambda stretch: stretch[1])
    last = bisect_left(stretches, ended, key=lambda stretch: stretch[0])
    return [(max(a, began), min(b, ended)) for a, b in stretches[first:last]]


def length(stretches: Iterable[Stretch]) -> float:
    """Return the length of all stretches together."""
    return sum(ended - began for began, ended in stretches)
