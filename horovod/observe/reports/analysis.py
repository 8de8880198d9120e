"""Find where the time of a step goes and which ranks are late: pure functions of recordings.

Every moment of a step of a rank is compute, wait, negotiation or reduction: see `splitting`. A step
lasts from the end of one exchange of gradients to the end of the next, which is about the same
moment on all ranks. Steps that are much longer than the others are set apart (see `losses`); all
other numbers are about the usual steps. Used by `advice`, `text` and `page`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

from horovod.observe.reports.amounts import milliseconds
from horovod.observe.reports.losses import LongSteps, Losses, find_losses, set_apart
from horovod.observe.reports.slow_ranks import SlowRanks
from horovod.observe.reports.splitting import RankTimes, Split, StepSplit
from horovod.observe.timeline.matching import Match, match
from horovod.observe.timeline.recording import DEVICES, Recording, TimeSpan

LATE_SHARE, LATE_MICROSECONDS = 0.01, 100.0  # of a step, and in all: the least delay that counts


@dataclass(frozen=True)
class AwaitedCollective:
    """All collectives of one name, and how long ranks waited for each other in them."""

    name: str
    count: int
    nbytes: int | None  # bytes of one collective
    tensors: tuple[str, ...]
    spread: float  # microseconds between the first and the last rank, on average
    waited: float  # microseconds that all ranks together waited for the last one
    last_rank: int | None  # the rank that was the last most often
    last_share: float  # the share of the collectives in which it was


@dataclass
class Analysis:
    """The result of `analyse`."""

    hosts: dict[int, str]  # by rank, for ranks with a file
    steps: list[StepSplit]  # the usual ones
    long_steps: LongSteps = field(default_factory=LongSteps)
    steps_from: str = ""  # what the steps are taken from
    awaited_collectives: list[AwaitedCollective] = field(default_factory=list)
    collectives_per_step: float = 0.0
    operations_per_step: float = 0.0  # operations that move data
    bytes_per_step: float = 0.0
    transports: list[str] = field(default_factory=list)  # e.g. SHM, TCP, NCCL
    missing_ranks: list[int] = field(default_factory=list)  # without a file
    cores: dict[int, frozenset[int]] = field(default_factory=dict)  # by rank, where known
    fusion_threshold: int | None = None  # bytes, at the start of the job
    notes: list[str] = field(default_factory=list)

    def mean(self, rank: int, part: str) -> float:
        """Return the microseconds, on average, that a rank spends in a part of a step."""
        return fmean(s.ranks[rank].part(part) for s in self.steps if rank in s.ranks)

    def share(self, rank: int, part: str) -> float:
        """Return the share of a step that a rank spends in a part of it."""
        return self.mean(rank, part) / (self.mean(rank, "duration") or 1.0)

    def overall(self, part: str) -> float:
        """Return the mean of a part over all ranks."""
        return fmean(self.mean(rank, part) for rank in self.ranks)

    @property
    def num_hosts(self) -> int:
        """The number of hosts of the ranks with a file."""
        return len(set(self.hosts.values()))

    @property
    def ranks(self) -> list[int]:
        """The ranks that have steps."""
        return sorted({rank for step in self.steps for rank in step.ranks})

    @property
    def step_time(self) -> float:
        """The median duration of a step."""
        return median(step.duration for step in self.steps)

    @cached_property
    def losses(self) -> Losses | None:
        """What a step loses to which cause; None without steps."""
        return find_losses(self.steps)

    @property
    def slow_ranks(self) -> SlowRanks | None:
        """The ranks that are slow in all steps."""
        return None if self.losses is None else self.losses.slow_ranks

    @property
    def run_time(self) -> float:
        """Microseconds of all steps, usual and long, except those at the beginning."""
        return sum(step.duration for step in self.all_steps)

    @property
    def all_steps(self) -> list[StepSplit]:
        """Usual and long steps in the order of time."""
        both = [*self.steps, *(each.step for each in self.long_steps.steps)]
        return sorted(both, key=lambda step: step.began)

    @property
    def on_devices(self) -> bool:
        """Whether devices reduce the gradients, whose clocks then measure the steps."""
        return bool(self.transports) and self.transports[0].startswith((*DEVICES, "HOST_COPY"))

    @property
    def slowest_counts(self) -> Counter[int]:
        """How often each rank was the slowest."""
        return Counter(step.slowest for step in self.steps if step.slowest is not None)

    def lateness_of(self, rank: int) -> list[float]:
        """Return how late a rank was in the steps in which it was the slowest."""
        return [step.lateness for step in self.steps if step.slowest == rank]

    def median_of(self, rank: int, part: str) -> float | None:
        """Return the median of a part that only some steps have, such as the time in backward."""
        parts = [s.ranks[rank].part(part) for s in self.steps if rank in s.ranks]
        values = [value for value in parts if value is not None]
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
        backward = [self.median_of(rank, "backward") for rank in self.ranks]
        lengths = [each for each in backward if each is not None]
        if not lengths or total <= 0:
            return None
        return max(self.overlap_achieved or 0.0, min(1.0, fmean(lengths) / total))


def analyse(recordings: Sequence[Recording]) -> Analysis:
    """Analyse recordings, which must be on one clock: see `clocks.align`."""
    matches = match(recordings)
    bounds, steps_from = find_steps(recordings, matches)
    times = {recording.rank: RankTimes(recording, matches) for recording in recordings}
    by_step = _group_by_step(bounds, matches)
    steps = []
    for number in sorted({n for spans in bounds.values() for n in spans}):
        here = {rank: spans[number] for rank, spans in bounds.items() if number in spans}
        splits = {rank: times[rank].split(span) for rank, span in here.items()}
        inside = by_step.get(number, [])
        slowest, lateness = _slowest(inside, splits)
        began = min(span.began for span in here.values())
        came = _arrivals(inside, bounds, number)
        steps.append(StepSplit(number, began, splits, slowest, lateness, came))
    usual, long_steps = set_apart(steps)
    hosts = {recording.rank: recording.host for recording in recordings}
    analysis = Analysis(hosts, usual, long_steps, steps_from=steps_from)
    inside = [each for step in usual for each in by_step.get(step.number, ())]
    analysis.awaited_collectives = _find_awaited(inside if usual else matches)
    if usual:
        analysis.collectives_per_step = len(inside) / len(usual)
        analysis.bytes_per_step = sum(each.nbytes or 0 for each in inside) / len(usual)
        counted = next(r for r in recordings if r.rank == min(bounds))
        spans = bounds[counted.rank]
        known = [spans[step.number] for step in usual if step.number in spans]
        if known:
            analysis.operations_per_step = _count_operations(counted, known) / len(known)
    moving = [phase for recording in recordings for phase in _moving(recording)]
    transports = Counter(phase.what.rpartition("_")[0] for phase in moving)
    analysis.transports = [name for name, _ in transports.most_common()]  # the most used first
    analysis.cores = {each.rank: each.cores for each in recordings if each.cores}
    thresholds = [r.fusion_threshold for r in recordings if r.fusion_threshold is not None]
    analysis.fusion_threshold = thresholds[0] if thresholds else None
    size = max((r.size or 0 for r in recordings), default=0)
    ranks = {rank for each in matches for rank in each.ready}
    analysis.missing_ranks = sorted(({*range(size)} | ranks) - set(hosts))
    analysis.notes += _notes(analysis, recordings)
    return analysis


def find_steps(
    recordings: Sequence[Recording], matches: Sequence[Match]
) -> tuple[dict[int, dict[int, TimeSpan]], str]:
    """Return the steps of each rank by number, and what they are taken from."""
    rows = Counter(row for recording in recordings for row in recording.steps)
    if rows:
        row = min(rows, key=lambda each: (-rows[each], each))
        bounds = {r.rank: {s.number: s for s in r.steps.get(row, ())} for r in recordings}
        return {rank: spans for rank, spans in bounds.items() if spans}, f"steps of {row}"
    # A program without our optimizer repeats its collectives in every step: take the most frequent.
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


def _group_by_step(
    bounds: dict[int, dict[int, TimeSpan]], matches: Sequence[Match]
) -> dict[int, list[Match]]:
    """Return the collectives that were agreed on in each step, by the first rank's clock."""
    if not bounds:
        return {}
    spans = sorted(bounds[min(bounds)].values(), key=lambda span: span.began)
    begins = [span.began for span in spans]
    found: dict[int, list[Match]] = {}
    for each in matches:
        index = bisect_right(begins, each.agreed) - 1
        if index >= 0 and each.agreed <= spans[index].ended:
            found.setdefault(spans[index].number, []).append(each)
    return found


def _arrivals(
    inside: Sequence[Match], bounds: dict[int, dict[int, TimeSpan]], number: int
) -> dict[int, float]:
    """Return how long each rank without steps took to submit all collectives of a step."""
    came: dict[int, float] = {}
    for each in inside:
        began = bounds[min(bounds)][number].began
        for rank in each.ready.keys() - bounds.keys():
            came[rank] = max(came.get(rank, 0.0), each.ready[rank] - began)
    return came


def _slowest(inside: Sequence[Match], splits: dict[int, Split]) -> tuple[int | None, float]:
    """Return the rank that came last in a step, if it came late, and how late at most."""
    late: dict[int, float] = {}
    for each in inside:
        if each.last_rank is not None:
            late[each.last_rank] = max(late.get(each.last_rank, 0.0), each.lateness)
    if not late:
        return None, 0.0
    rank = max(late, key=lambda each: late[each])
    duration = median(split.duration for split in splits.values())
    is_late = late[rank] >= max(LATE_SHARE * duration, LATE_MICROSECONDS)
    return rank if is_late else None, late[rank]


def _find_awaited(matches: Sequence[Match]) -> list[AwaitedCollective]:
    """Return the collectives by name, those first that ranks waited for longest."""
    groups: dict[str, list[Match]] = {}
    for each in matches:
        groups.setdefault(each.name, []).append(each)
    rows = []
    for name, group in groups.items():
        ready = [each.ready.values() for each in group]
        last = Counter(each.last_rank for each in group if each.last_rank is not None)
        rank, times = last.most_common(1)[0] if last else (None, 0)
        tensors = next(iter(group[-1].parts.values())).about.get("names", ())
        spread = fmean(max(each) - min(each) for each in ready)
        waited = sum(max(each) - time for each in ready for time in each)
        about = name, len(group), group[-1].nbytes, tuple(tensors)
        rows.append(AwaitedCollective(*about, spread, waited, rank, times / len(group)))
    return sorted(rows, key=lambda each: (-each.spread * each.count, each.name))


def _count_operations(recording: Recording, steps: Iterable[TimeSpan]) -> int:
    """Count how often data was moved and reduced in these steps.

    A collective of several tensors takes several operations if they do not fit the fusion buffer,
    and collectives that are fused take one together. A transport does one operation after the
    other, so phases that overlap are one operation, which is recorded in the row of each tensor.
    """
    begins: list[float] = []
    free = float("-inf")
    for phase in sorted(_moving(recording), key=lambda phase: (phase.began, phase.ended)):
        if phase.began >= free:
            begins.append(phase.began)
        free = max(free, phase.ended)
    return sum(bisect_left(begins, s.ended) - bisect_right(begins, s.began) for s in steps)


def _moving(recording: Recording) -> Iterable[TimeSpan]:
    """Yield the phases in which data is moved and reduced."""
    for each in recording.collectives:
        for phase in each.phases:
            if phase.what.endswith(f"_{each.kind}"):
                yield phase


def _notes(analysis: Analysis, recordings: Sequence[Recording]) -> Iterator[str]:
    """Yield what limits what the files can tell."""
    if analysis.missing_ranks:
        ranks = ", ".join(str(rank) for rank in analysis.missing_ranks[:8])
        more = " ..." if len(analysis.missing_ranks) > 8 else ""
        yield (
            f"The files of rank {ranks}{more} are not here: their steps are unknown. Name all "
            f"files of the job, timeline*.json."
        )
    old = [recording.rank for recording in recordings if recording.version < 2]
    if old:
        yield (
            f"The file of rank {old[0]} is of an earlier version, which does not tell when the "
            f"program waited: all collectives count as waited for, and none as hidden."
        )
    long = analysis.long_steps
    if long.warm_up:
        yield f"{long.warm_up} of the first steps took long, as first steps often do: left out."
    if len(long.steps) == 1:
        total = len(analysis.steps) + 1 + long.warm_up
        yield (
            f"Step {long.numbers[0]} of {total} steps was long, "
            f"{milliseconds(long.steps[0].excess)} more than the others, and is left out of what "
            f"is said about a step."
        )
    cut = [r.rank for r in recordings if any(c.ended is None and c.started for c in r.collectives)]
    if cut:
        ranks = ", ".join(map(str, cut[:8]))
        yield f"The recording of rank {ranks} ends inside a collective."
