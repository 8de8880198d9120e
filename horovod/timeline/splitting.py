"""One rank's time, cut into steps and each step into its parts. Used by `analysis`.

Every moment of a step of a rank is one of four things:

- compute: the program runs; what collectives do meanwhile is hidden behind it. Data loading, the
  optimizer's update and everything else that is the program's own count as well;
- wait: the program waits for results, and a rank has not yet submitted something that is pending
  here. If other collectives run meanwhile, they are hidden behind that rank's delay;
- reduction: it waits, all ranks have submitted, and a collective moves and reduces data;
- negotiation: it waits, all ranks have submitted, and they have yet to agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from horovod.timeline.intervals import Stretch, clip, difference, intersection, length, union
from horovod.timeline.matching import Match
from horovod.timeline.recording import Recording, TimeSpan

PARTS = ("compute", "negotiation", "wait", "reduction")


@dataclass(frozen=True)
class Split:
    """One rank's part of one step, in microseconds."""

    duration: float
    negotiation: float
    wait: float
    reduction: float
    hidden: float = 0.0  # of reductions, behind compute here or on a rank that is late
    before_backward: float | None = None  # until the first gradient: update, data loading, forward
    backward: float | None = None  # from the first gradient until they are waited for
    starved: float | None = None  # the thread wanted a core and had none; None where unknown
    blocked: float | None = None  # of compute, at least: it neither ran nor wanted a core

    @property
    def compute(self) -> float:
        return max(0.0, self.duration - self.negotiation - self.wait - self.reduction)

    @property
    def starved_computing(self) -> float:
        """The part of `starved` that fell into compute, taken as spread over all but the wait."""
        busy = self.duration - self.wait
        return min(self.compute, (self.starved or 0.0) * self.compute / busy) if busy > 0 else 0.0

    def part(self, name: str) -> float:
        value: float = getattr(self, name)
        return value


@dataclass(frozen=True)
class StepSplit:
    """One step on all ranks."""

    number: int
    began: float
    ranks: dict[int, Split]
    slowest: int | None  # that the others waited for; None if no rank was late
    lateness: float  # how much later it came than the others
    arrivals: dict[int, float] = field(default_factory=dict)  # of ranks without a file, when
    # each had submitted all of the step, in microseconds after its beginning

    @property
    def duration(self) -> float:
        return median(split.duration for split in self.ranks.values())

    @property
    def computes(self) -> dict[int, float]:
        """How long each rank computed, as far as anything tells."""
        return self.arrivals | {rank: split.compute for rank, split in self.ranks.items()}

    @property
    def starved(self) -> dict[int, float]:
        """For how long each rank had no core while it computed; 0 where unknown."""
        known = {rank: split.starved_computing for rank, split in self.ranks.items()}
        return dict.fromkeys(self.arrivals, 0.0) | known


class RankTimes:
    """What one rank did when, ready to be cut into steps."""

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
                # A device waits for other ranks inside of a collective that it began by itself.
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
        else:  # nothing tells when the program waited: take all collectives as waited for
            self.exposed = union([*executing, *waiting, *negotiating])
        self.wait = intersection(self.exposed, union(waiting))
        rest = difference(self.exposed, union(waiting))
        self.reduction = intersection(rest, self.executing)
        rest = difference(rest, self.executing)
        self.negotiation = intersection(rest, union(negotiating))
        self.backwards = [span for spans in recording.backwards.values() for span in spans]
        self.backwards.sort(key=lambda span: span.ended)

    def split(self, span: TimeSpan) -> Split:
        """The parts of the step that lasted this long."""
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
        index = bisect_right(self.backwards, step.ended, key=lambda span: span.ended) - 1
        found = self.backwards[index] if index >= 0 else None
        return found if found is not None and found.began >= step.began else None
