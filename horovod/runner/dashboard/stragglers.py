"""Which ranks hold the others up, and why, as far as the reports tell.

Pure; `board` calls `find_stragglers` every time it is brought up to date and hands the result to
`Verdicts`, which says it only once it has lasted. In synchronous training all ranks have the same
step time: the slow one is the one that does *not* wait. So ranks are compared by what their steps
are made of. A rank counts by the median of its last steps: one long step says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.runner.dashboard.reports import ReportedStep

STOPPED, SILENT, AWAITED = "stopped", "silent", "awaited"
BACKWARD, COMPUTE, LINK = "backward", "compute", "link"
REASONS = (STOPPED, SILENT, AWAITED, BACKWARD, COMPUTE, LINK)

WINDOW = 20
"""Steps of a rank that its median is taken of."""

FEWEST_STEPS = 3
_LEAST_SECONDS = 0.002
"""Differences that timers and schedulers make by themselves."""

LASTING_STEPS = 10
LASTING_REPORTS = 3
"""What steps are made of must be found for this many steps, and for the time of this many reports,
before it is said, and must be gone for as long before it is taken back."""

MOST_STEPS_UNTIL_NAMED = WINDOW // 2 + 1 + LASTING_STEPS
"""Steps after which a rank that has become slow is named, where reports come as fast as steps."""

SILENT_INTERVALS = 5.0
SILENT_SECONDS = 5.0
"""A rank is silent after this many intervals without a report, and never before these seconds."""

AWAITED_SECONDS = 2.0
_AWAITED_STEPS = 5.0
"""Others wait for a rank when they do so for these seconds, and for the time of these steps."""

ADVICE = {
    STOPPED: "Let it go on: kill -CONT with its process number on its host, or leave the debugger.",
    SILENT: "Look whether its host answers, and what else runs there (top, dmesg).",
    AWAITED: "Look at its stack and its last output lines: a validation or a checkpoint of its "
    "own, data that comes slowly, a collective that only some ranks call.",
    BACKWARD: "Look at its cores or GPU (other programs, clock, temperature, OMP_NUM_THREADS) and "
    "the sizes of its batches.",
    COMPUTE: "Look at its data loading first (loader workers, slow disk, longer samples), then at "
    "forward.",
    LINK: "Look at its network: another interface (--network-interfaces), other traffic, cables; "
    "compression=hvd.Compression.bf16 halves the bytes.",
}
"""What to try, by kind of finding."""


@dataclass(frozen=True)
class _Sensitivity:
    """How large a difference must be to say something about a rank."""

    slower: float  # times as long as ranks usually take
    share: float  # the difference is at least this share of a step
    patience: float  # by which all times to wait for a rank are multiplied


_OWN_CORE = _Sensitivity(1.25, 0.1, 1.0)
_CROWDED = _Sensitivity(2.0, 0.3, 3.0)
"""Where ranks outnumber cores they take turns: whose turn it is says nothing about the rank."""


@dataclass(frozen=True)
class TypicalStep:
    """Medians of the last steps of a rank, in seconds."""

    total: float
    compute: float
    backward: float
    wait: float
    reduce: float
    exposed: float

    @classmethod
    def of(cls, steps: Sequence[ReportedStep]) -> TypicalStep | None:
        """None where there are too few steps to say anything."""
        if len(steps) < FEWEST_STEPS:
            return None
        return cls(
            statistics.median([step.total for step in steps]),
            statistics.median([step.compute for step in steps]),
            statistics.median([step.backward for step in steps]),
            statistics.median([step.wait for step in steps]),
            statistics.median([step.reduce for step in steps]),
            statistics.median([step.exposed for step in steps]),
        )


@dataclass(frozen=True)
class RankView:
    """What is known of a rank when stragglers are looked for."""

    host: str
    typical: TypicalStep | None  # of its last steps
    silent: float  # seconds since its last report
    process_state: str  # letter of /proc/<pid>/stat; empty where that cannot be read
    awaited: float = 0.0  # seconds that others have waited for it
    waiting: int = 0  # how many others
    is_crowded: bool = False  # the ranks of its host outnumber the cores

    @property
    def sensitivity(self) -> _Sensitivity:
        return _CROWDED if self.is_crowded else _OWN_CORE


@dataclass(frozen=True)
class Straggler:
    """Why a rank holds the others up."""

    kind: str
    text: str

    @property
    def advice(self) -> str:
        """What to try."""
        return ADVICE[self.kind]

    @property
    def is_judged(self) -> bool:
        """Whether it follows from comparing steps. The other kinds are facts of this moment."""
        return self.kind in (BACKWARD, COMPUTE, LINK)


def find_stragglers(ranks: Mapping[int, RankView], interval: float) -> dict[int, Straggler]:
    """The ranks that hold others up, by rank. ``interval``: seconds between two reports."""
    found: dict[int, Straggler] = {}
    for rank, view in ranks.items():
        finding = _is_not_running(view, interval)
        if finding is not None:
            found[rank] = finding
    judged = {
        rank: view.typical
        for rank, view in ranks.items()
        if rank not in found and view.typical is not None
    }
    if len(judged) > 1:
        found |= _slow_steps(judged, ranks)
    usual = usual_step(ranks.values())
    for rank, view in ranks.items():
        if rank not in found and view.waiting and view.awaited >= awaited_seconds(view, usual):
            found[rank] = Straggler(AWAITED, f"late in this step: {_others_wait(view)}")
    return found


def usual_step(ranks: Iterable[RankView]) -> float:
    """Seconds of a usual step of the job; 0 before there are enough."""
    totals = [view.typical.total for view in ranks if view.typical is not None]
    return statistics.median(totals) if totals else 0.0


def awaited_seconds(view: RankView, step: float) -> float:
    """How long others wait for a rank before that is worth a word; ``step``: a usual one."""
    return max(AWAITED_SECONDS * view.sensitivity.patience, _AWAITED_STEPS * step)


class Verdicts:
    """What is said about each rank: findings that have lasted, until they have gone for good.

    Facts are taken back at once. That a process is stopped or silent is said at once, too; that
    others wait for a rank, when it is still so a report later: until then they may have gone on.
    """

    def __init__(self) -> None:
        self._cases: dict[int, _Case] = {}

    def settle(
        self,
        found: Mapping[int, Straggler],
        steps: Mapping[int, int],
        now: float,
        interval: float,
    ) -> dict[int, Straggler]:
        """Take the findings of this moment; returns what is to be said of the ranks in ``steps``.

        ``steps`` has the number of steps that each rank has made so far.
        """
        self._cases = {rank: self._cases.get(rank) or _Case() for rank in steps}
        for rank, case in self._cases.items():
            case.take(found.get(rank), steps[rank], now, interval)
        return {rank: case.said for rank, case in self._cases.items() if case.said is not None}


@dataclass
class _Case:
    """One rank: what is said about it, and what has been found since when."""

    said: Straggler | None = None
    found: str = ""  # kind of what is found now; empty: nothing
    since_step: int = 0
    since: float = 0.0

    def take(self, finding: Straggler | None, step: int, now: float, interval: float) -> None:
        kind = finding.kind if finding is not None else ""
        if self.said is not None and not self.said.is_judged and self.said.kind != kind:
            self.said = None
        if kind != self.found:
            self.found, self.since_step, self.since = kind, step, now
        if kind == AWAITED:
            steps, seconds = 0, interval
        elif kind in (STOPPED, SILENT):
            steps, seconds = 0, 0.0
        else:
            steps, seconds = LASTING_STEPS, LASTING_REPORTS * interval
        is_said = kind == (self.said.kind if self.said is not None else "")
        if is_said or (step - self.since_step >= steps and now - self.since >= seconds):
            self.said = finding


def _is_not_running(view: RankView, interval: float) -> Straggler | None:
    others = f"; {_others_wait(view)}" if view.waiting else ""
    if view.process_state in ("T", "t"):
        how = "by a debugger" if view.process_state == "t" else "by a signal (state T)"
        return Straggler(STOPPED, f"stopped {how}{others}")
    patience = max(SILENT_SECONDS, SILENT_INTERVALS * interval) * view.sensitivity.patience
    if view.silent <= patience:
        return None
    guess = {
        "D": "waits for a disk or a file server (state D)",
        "Z": "has ended",
        "": "stopped, too busy, or its host cannot be reached",
    }.get(view.process_state, "its Python does not get to run")
    return Straggler(SILENT, f"no report for {seconds_text(view.silent)}: {guess}{others}")


def _slow_steps(
    steps: Mapping[int, TypicalStep], ranks: Mapping[int, RankView]
) -> dict[int, Straggler]:
    found: dict[int, Straggler] = {}
    usual_compute = statistics.median_low([step.compute for step in steps.values()])
    usual_backward = statistics.median_low([step.backward for step in steps.values()])
    usual_reduce = statistics.median_low([step.reduce for step in steps.values()])
    hosts = {ranks[rank].host for rank in steps}
    slow_links = set()
    for rank, step in steps.items():
        limits = ranks[rank].sensitivity
        excess = step.compute - usual_compute
        if _is_slow(step.compute, usual_compute, step.total, limits):
            in_backward = step.backward - usual_backward > excess / 2
            where = "late in backward" if in_backward else "late before backward (input, forward)"
            kind = BACKWARD if in_backward else COMPUTE
            found[rank] = Straggler(
                kind,
                f"{where}: computes {seconds_text(step.compute)} a step, others "
                f"{seconds_text(usual_compute)}",
            )
        elif len(hosts) > 1 and _is_slow(step.reduce, usual_reduce, step.total, limits):
            slow_links.add(rank)  # inside one host there is no link that could be slow
    for rank in slow_links:
        host = ranks[rank].host
        peers = {other for other in steps if ranks[other].host == host}
        whose = f" of {host}" if slow_links >= peers else ""
        found[rank] = Straggler(
            LINK,
            f"slow link{whose}: reduces for {seconds_text(steps[rank].reduce)} a step, others "
            f"{seconds_text(usual_reduce)}",
        )
    return found


def _is_slow(own: float, usual: float, step: float, limits: _Sensitivity) -> bool:
    return own > limits.slower * usual and own - usual > max(_LEAST_SECONDS, limits.share * step)


def _others_wait(view: RankView) -> str:
    who = "1 rank has" if view.waiting == 1 else f"{view.waiting} ranks have"
    return f"{who} waited {seconds_text(view.awaited)} for it"


def seconds_text(value: float) -> str:
    """Seconds for people, in two digits or so."""
    if value < 0.0995:
        return f"{value * 1000:.1f} ms" if value < 0.00995 else f"{value * 1000:.0f} ms"
    return f"{value:.2g} s" if value < 9.95 else f"{value:.0f} s"
