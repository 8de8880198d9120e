"""Where the time of a step goes, and who is late. Pure functions over aligned recordings.

Every moment of a step of a rank is one of four things:

- compute: the program runs; what collectives do meanwhile is hidden behind it. Data loading, the
  optimizer's update and everything else that is the program's own count as well;
- wait: the program waits for results, and a rank has not yet submitted something that is pending
  here. If other collectives run meanwhile, they are hidden behind that rank's delay;
- reduction: it waits, all ranks have submitted, and a collective moves and reduces data;
- negotiation: it waits, all ranks have submitted, and they have yet to agree.

A step lasts from the end of one exchange of gradients to the end of the next, which is about the
same moment on all ranks. Used by `advice`, `text` and `page`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

from horovod.timeline.intervals import Stretch, clip, difference, intersection, length, union
from horovod.timeline.matching import Match, match
from horovod.timeline.recording import Recording, TimeSpan

PARTS = ("compute", "negotiation", "wait", "reduction")
LONG_STEP = 5.0  # times the median: evaluation, a checkpoint, a break
LATE_SHARE, LATE_LEAST = 0.01, 100.0  # of a step, and microseconds: less is not late


@dataclass(frozen=True)
class Split:
    """One rank's part of one step, in microseconds."""

    duration: float
    negotiation: float
    wait: float
    reduction: float
    hidden: float = 0.0  # of reductions, behind compute here or on a rank that is late
    before_backward: float | None = None  # until the first gradient: data loading, forward
    backward: float | None = None  # from the first gradient until they are waited for

    @property
    def compute(self) -> float:
        return max(0.0, self.duration - self.negotiation - self.wait - self.reduction)

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

    @property
    def duration(self) -> float:
        return median(split.duration for split in self.ranks.values())


@dataclass(frozen=True)
class Awaited:
    """The collectives of one name, and how ranks waited for each other in them."""

    name: str
    count: int
    nbytes: int | None  # of one
    tensors: tuple[str, ...]
    spread: float  # microseconds between the first and the last rank, on average
    waited: float  # by all ranks for the last one, in all
    last_rank: int | None  # most often
    last_share: float  # how often


@dataclass
class Analysis:
    """What `analyse` found."""

    hosts: dict[int, str]  # of each rank with a file
    steps: list[StepSplit]
    left_out: int = 0  # steps that are much longer than the others
    steps_from: str = ""  # what the steps are taken from
    awaited: list[Awaited] = field(default_factory=list)
    collectives_per_step: float = 0.0
    bytes_per_step: float = 0.0
    transports: list[str] = field(default_factory=list)  # e.g. SHM, TCP, NCCL
    missing: list[int] = field(default_factory=list)  # ranks without a file
    notes: list[str] = field(default_factory=list)

    def mean(self, rank: int, part: str) -> float:
        """Microseconds of a step, on average, that the rank spends in this part of it."""
        return fmean(s.ranks[rank].part(part) for s in self.steps if rank in s.ranks)

    def share(self, rank: int, part: str) -> float:
        return self.mean(rank, part) / (self.mean(rank, "duration") or 1.0)

    def overall(self, part: str) -> float:
        """The same over all ranks."""
        return fmean(self.mean(rank, part) for rank in self.ranks)

    @property
    def ranks(self) -> list[int]:
        """Ranks with steps."""
        return sorted({rank for step in self.steps for rank in step.ranks})

    @property
    def step_time(self) -> float:
        return median(step.duration for step in self.steps)

    @property
    def slowest_counts(self) -> Counter[int]:
        """How often each rank was the slowest."""
        return Counter(step.slowest for step in self.steps if step.slowest is not None)

    def known(self, rank: int, part: str) -> float | None:
        """The median of what only some steps tell, such as the time in backward."""
        found = [s.ranks[rank].part(part) for s in self.steps if rank in s.ranks]
        values = [value for value in found if value is not None]
        return median(values) if values else None

    @property
    def overlap_achieved(self) -> float | None:
        """The share of reductions that was hidden behind compute."""
        hidden, exposed = self.overall("hidden"), self.overall("reduction")
        return hidden / (hidden + exposed) if hidden + exposed > 0 else None

    @property
    def overlap_possible(self) -> float | None:
        """The share that backward is long enough to hide, if all of it could be used."""
        total = self.overall("hidden") + self.overall("reduction")
        backward = [self.known(rank, "backward") for rank in self.ranks]
        lengths = [each for each in backward if each is not None]
        if not lengths or total <= 0:
            return None
        return max(self.overlap_achieved or 0.0, min(1.0, fmean(lengths) / total))


def analyse(recordings: Sequence[Recording]) -> Analysis:
    """Find out all of it. The recordings must be on one clock: see `clocks.align`."""
    matches = match(recordings)
    bounds, steps_from = find_steps(recordings, matches)
    times = {recording.rank: _Times(recording, matches) for recording in recordings}
    late = _lateness(bounds, matches)
    steps = []
    for number in sorted({n for spans in bounds.values() for n in spans}):
        here = {rank: spans[number] for rank, spans in bounds.items() if number in spans}
        splits = {rank: times[rank].split(span) for rank, span in here.items()}
        slowest, lateness = _slowest(late.get(number, {}), splits)
        steps.append(
            StepSplit(number, min(s.began for s in here.values()), splits, slowest, lateness)
        )
    found = Analysis({r.rank: r.host for r in recordings}, steps, steps_from=steps_from)
    _leave_out_long(found)
    inside = _inside_steps(found, bounds, matches)
    found.awaited = awaited(inside if found.steps else matches)
    if found.steps:
        found.collectives_per_step = len(inside) / len(found.steps)
        found.bytes_per_step = sum(each.nbytes or 0 for each in inside) / len(found.steps)
    found.transports = _transports(recordings)
    size = max((r.size or 0 for r in recordings), default=0)
    told = {rank for each in matches for rank in each.ready}
    found.missing = sorted(({*range(size)} | told) - set(found.hosts))
    _note(found, recordings)
    return found


def find_steps(
    recordings: Sequence[Recording], matches: Sequence[Match]
) -> tuple[dict[int, dict[int, TimeSpan]], str]:
    """The steps of each rank by number, and what they are taken from."""
    rows = Counter(row for recording in recordings for row in recording.steps)
    if rows:
        row = min(rows, key=lambda each: (-rows[each], each))
        bounds = {r.rank: {s.number: s for s in r.steps.get(row, ())} for r in recordings}
        return {rank: spans for rank, spans in bounds.items() if spans}, f"steps of {row}"
    # Other programs repeat their collectives in every step: one of these marks it.
    names = Counter(each.name for each in matches)
    if not names or max(names.values()) < 2:
        return {}, ""
    name = max(names, key=lambda each: names[each])
    marks = [each for each in matches if each.name == name]
    found: dict[int, dict[int, TimeSpan]] = {}
    for number, (one, other) in enumerate(pairwise(marks), 1):
        for rank in one.parts.keys() & other.parts.keys():
            began, ended = one.parts[rank].ended, other.parts[rank].ended
            if began is not None and ended is not None and began < ended:
                found.setdefault(rank, {})[number] = TimeSpan(began, ended, number)
    return found, f"repetitions of {name}" if found else ""


class _Times:
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
            last = part.agreed if each.last_ready is None else each.last_ready
            last = min(max(last, part.submitted), part.agreed)
            waiting.append((part.submitted, last))
            negotiating.append((last, part.agreed))
            if part.started is not None:
                executing.append((part.started, part.ended or recording.ended))
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
        began, ended = span.began, span.ended
        reduction = length(clip(self.reduction, began, ended))
        backward = self._backward(span)
        before = None
        if backward is not None:
            before = backward.began - began - length(clip(self.exposed, began, backward.began))
        return Split(
            duration=ended - began,
            negotiation=length(clip(self.negotiation, began, ended)),
            wait=length(clip(self.wait, began, ended)),
            reduction=reduction,
            hidden=length(clip(self.executing, began, ended)) - reduction,
            before_backward=before,
            backward=None if backward is None else backward.ended - backward.began,
        )

    def _backward(self, step: TimeSpan) -> TimeSpan | None:
        index = bisect_right(self.backwards, step.ended, key=lambda span: span.ended) - 1
        found = self.backwards[index] if index >= 0 else None
        return found if found is not None and found.began >= step.began else None


def _steps_in_time(bounds: dict[int, dict[int, TimeSpan]]) -> tuple[list[float], list[TimeSpan]]:
    """The steps of the first rank, by which collectives are given to steps."""
    if not bounds:
        return [], []
    spans = sorted(bounds[min(bounds)].values(), key=lambda span: span.began)
    return [span.began for span in spans], spans


def _step_of(each: Match, begins: Sequence[float], spans: Sequence[TimeSpan]) -> int | None:
    index = bisect_right(begins, each.agreed) - 1
    if index < 0 or spans[index].ended < each.agreed:
        return None
    return spans[index].number


def _lateness(
    bounds: dict[int, dict[int, TimeSpan]], matches: Sequence[Match]
) -> dict[int, dict[int, float]]:
    """For each step the ranks that came last to a collective, and how late at most."""
    begins, spans = _steps_in_time(bounds)
    found: dict[int, dict[int, float]] = {}
    for each in matches:
        number, last = _step_of(each, begins, spans), each.last_rank
        if number is not None and last is not None:
            ranks = found.setdefault(number, {})
            ranks[last] = max(ranks.get(last, 0.0), each.lateness)
    return found


def _slowest(late: dict[int, float], splits: dict[int, Split]) -> tuple[int | None, float]:
    if not late:
        return None, 0.0
    rank = max(late, key=lambda each: late[each])
    duration = median(split.duration for split in splits.values())
    if late[rank] < max(LATE_SHARE * duration, LATE_LEAST):
        return None, late[rank]
    return rank, late[rank]


def _leave_out_long(found: Analysis) -> None:
    if not found.steps:
        return
    limit = LONG_STEP * found.step_time
    kept = [step for step in found.steps if step.duration <= limit]
    found.left_out, found.steps = len(found.steps) - len(kept), kept


def _inside_steps(
    found: Analysis, bounds: dict[int, dict[int, TimeSpan]], matches: Sequence[Match]
) -> list[Match]:
    """The collectives of the steps that count."""
    numbers = {step.number for step in found.steps}
    begins, spans = _steps_in_time(bounds)
    return [each for each in matches if _step_of(each, begins, spans) in numbers]


def awaited(matches: Sequence[Match]) -> list[Awaited]:
    """By name, those first that ranks waited for longest."""
    groups: dict[str, list[Match]] = {}
    for each in matches:
        groups.setdefault(each.name, []).append(each)
    found = []
    for name, group in groups.items():
        ready = [each.ready.values() for each in group]
        last = Counter(each.last_rank for each in group if each.last_rank is not None)
        rank, times = last.most_common(1)[0] if last else (None, 0)
        parts = next(iter(group[-1].parts.values()))
        found.append(
            Awaited(
                name=name,
                count=len(group),
                nbytes=group[-1].nbytes,
                tensors=tuple(parts.about.get("names", ())),
                spread=fmean(max(each) - min(each) for each in ready),
                waited=sum(max(each) - time for each in ready for time in each),
                last_rank=rank,
                last_share=times / len(group),
            )
        )
    return sorted(found, key=lambda each: (-each.spread * each.count, each.name))


def _transports(recordings: Sequence[Recording]) -> list[str]:
    names = Counter(
        phase.name.rpartition("_")[0]
        for recording in recordings
        for each in recording.collectives
        for phase in each.phases
        if phase.name.endswith(f"_{each.kind}")
    )
    return [name for name, _ in names.most_common()]


def _note(found: Analysis, recordings: Sequence[Recording]) -> None:
    """What limits what the files can tell."""
    if found.missing:
        ranks = ", ".join(str(rank) for rank in found.missing[:8])
        more = " ..." if len(found.missing) > 8 else ""
        found.notes.append(
            f"The files of rank {ranks}{more} are not here: their steps are unknown. Name all "
            f"files of the job, timeline*.json."
        )
    old = [recording.rank for recording in recordings if recording.version < 2]
    if old:
        found.notes.append(
            f"The file of rank {old[0]} is of an earlier version, which does not tell when the "
            f"program waited: all collectives count as waited for, and none as hidden."
        )
    if found.left_out:
        found.notes.append(
            f"{found.left_out} of {found.left_out + len(found.steps)} steps took more than "
            f"{LONG_STEP:g} times the median (evaluation, checkpoints, breaks) and are left out."
        )
    cut = [r.rank for r in recordings if any(c.ended is None and c.started for c in r.collectives)]
    if cut:
        ranks = ", ".join(map(str, cut[:8]))
        found.notes.append(f"The recording of rank {ranks} ends inside a collective.")
