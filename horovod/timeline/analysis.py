"""Where the time of a step goes, and who is late. Pure functions over aligned recordings.

Every moment of a step of a rank is compute, wait, negotiation or reduction: see `splitting`. A step
lasts from the end of one exchange of gradients to the end of the next, which is about the same
moment on all ranks. Steps that are much longer than the others are set apart (`long_steps`), and
what is said about a step is said about the others. Used by `advice`, `text` and `page`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

from horovod.common.slow_ranks import SlowRanks
from horovod.timeline.amounts import milliseconds
from horovod.timeline.collectives import Awaited, awaited, count_operations, transports
from horovod.timeline.format import DEVICES
from horovod.timeline.long_steps import LongSteps, set_apart
from horovod.timeline.losses import Losses, find_losses
from horovod.timeline.matching import Match, match
from horovod.timeline.recording import Recording, TimeSpan
from horovod.timeline.splitting import RankTimes, Split, StepSplit

LATE_SHARE, LATE_LEAST = 0.01, 100.0  # of a step, and microseconds: less is not late


@dataclass
class Analysis:
    """What `analyse` found."""

    hosts: dict[int, str]  # of each rank with a file
    steps: list[StepSplit]  # except those that are much longer than the others
    long: LongSteps = field(default_factory=LongSteps)
    steps_from: str = ""  # what the steps are taken from
    awaited: list[Awaited] = field(default_factory=list)
    collectives_per_step: float = 0.0
    operations_per_step: float = 0.0  # in which data is moved: more if they are not fused
    bytes_per_step: float = 0.0
    transports: list[str] = field(default_factory=list)  # e.g. SHM, TCP, NCCL
    missing: list[int] = field(default_factory=list)  # ranks without a file
    cores: dict[int, frozenset[int]] = field(default_factory=dict)  # of each rank, where known
    fusion_threshold: int | None = None  # bytes, at the start of the job
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

    @cached_property
    def losses(self) -> Losses | None:
        """What a step loses to which cause; None without steps."""
        return find_losses(self.steps)

    @property
    def slow(self) -> SlowRanks | None:
        """The ranks that are slow in all steps."""
        return None if self.losses is None else self.losses.slow

    @property
    def run_time(self) -> float:
        """Microseconds of all steps, long ones as well, except those at the beginning."""
        return sum(step.duration for step in self.all_steps)

    @property
    def all_steps(self) -> list[StepSplit]:
        """Usual and long ones in the order of time."""
        both = [*self.steps, *(each.step for each in self.long.steps)]
        return sorted(both, key=lambda step: step.began)

    @property
    def on_devices(self) -> bool:
        """Whether gradients are reduced by devices, whose clocks the steps go by."""
        return bool(self.transports) and self.transports[0].startswith((*DEVICES, "HOST_COPY"))

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
    times = {recording.rank: RankTimes(recording, matches) for recording in recordings}
    late = _lateness(bounds, matches)
    arrivals = _arrivals(bounds, matches)
    steps = []
    for number in sorted({n for spans in bounds.values() for n in spans}):
        here = {rank: spans[number] for rank, spans in bounds.items() if number in spans}
        splits = {rank: times[rank].split(span) for rank, span in here.items()}
        slowest, lateness = _slowest(late.get(number, {}), splits)
        began = min(span.began for span in here.values())
        came = arrivals.get(number, {})
        steps.append(StepSplit(number, began, splits, slowest, lateness, came))
    usual, long = set_apart(steps)
    hosts = {recording.rank: recording.host for recording in recordings}
    found = Analysis(hosts, usual, long, steps_from=steps_from)
    inside = _inside_steps(found, bounds, matches)
    found.awaited = awaited(inside if found.steps else matches)
    if found.steps:
        found.collectives_per_step = len(inside) / len(found.steps)
        found.bytes_per_step = sum(each.nbytes or 0 for each in inside) / len(found.steps)
        counted = next(r for r in recordings if r.rank == min(bounds))
        spans = [bounds[counted.rank].get(step.number) for step in found.steps]
        known = [span for span in spans if span is not None]
        if known:
            found.operations_per_step = count_operations(counted, known) / len(known)
    found.transports = transports(recordings)
    found.cores = {recording.rank: recording.cores for recording in recordings if recording.cores}
    thresholds = [r.fusion_threshold for r in recordings if r.fusion_threshold is not None]
    found.fusion_threshold = thresholds[0] if thresholds else None
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


def _arrivals(
    bounds: dict[int, dict[int, TimeSpan]], matches: Sequence[Match]
) -> dict[int, dict[int, float]]:
    """For each step when each rank without steps had submitted all of it, after its beginning."""
    begins, spans = _steps_in_time(bounds)
    began = {span.number: span.began for span in spans}
    found: dict[int, dict[int, float]] = {}
    for each in matches:
        unknown = each.ready.keys() - bounds.keys()
        number = _step_of(each, begins, spans) if unknown else None
        if number is not None:
            came = found.setdefault(number, {})
            for rank in unknown:
                came[rank] = max(came.get(rank, 0.0), each.ready[rank] - began[number])
    return found


def _slowest(late: dict[int, float], splits: dict[int, Split]) -> tuple[int | None, float]:
    if not late:
        return None, 0.0
    rank = max(late, key=lambda each: late[each])
    duration = median(split.duration for split in splits.values())
    if late[rank] < max(LATE_SHARE * duration, LATE_LEAST):
        return None, late[rank]
    return rank, late[rank]


def _inside_steps(
    found: Analysis, bounds: dict[int, dict[int, TimeSpan]], matches: Sequence[Match]
) -> list[Match]:
    """The collectives of the steps that count."""
    numbers = {step.number for step in found.steps}
    begins, spans = _steps_in_time(bounds)
    return [each for each in matches if _step_of(each, begins, spans) in numbers]


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
    total = len(found.steps) + len(found.long.steps) + found.long.warm_up
    if found.long.warm_up:
        found.notes.append(
            f"{found.long.warm_up} of the first steps took long, as first steps often do: left out."
        )
    if len(found.long.steps) == 1:
        (number,) = found.long.numbers
        found.notes.append(
            f"Step {number} of {total} steps was long, {milliseconds(found.long.steps[0].excess)} "
            f"more than the others, and is left out of what is said about a step."
        )
    cut = [r.rank for r in recordings if any(c.ended is None and c.started for c in r.collectives)]
    if cut:
        ranks = ", ".join(map(str, cut[:8]))
        found.notes.append(f"The recording of rank {ranks} ends inside a collective.")
