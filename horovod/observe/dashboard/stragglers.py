"""Find the ranks that hold others up, and why, as far as the reports show it.

These are pure functions. `board` calls `find_stragglers` at every update and hands the result to
`Verdicts`, which shows a finding only once it has lasted. In synchronous training all ranks have
the same step time: the slow one is the one that does *not* wait. So ranks are compared by the parts
of their steps. The median of a rank's last steps counts, because one long step says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.observe.dashboard.reports import ReportedStep

STOPPED, SILENT, AWAITED = "stopped", "silent", "awaited"
BACKWARD, COMPUTE, LINK = "backward", "compute", "link"
REASONS = (STOPPED, SILENT, AWAITED, BACKWARD, COMPUTE, LINK)

WINDOW = 20
"""The number of steps of a rank of which the median is taken."""

FEWEST_STEPS = 3
_LEAST_SECONDS = 0.002
"""Timers and schedulers cause differences up to this one."""

LASTING_STEPS = 10
LASTING_REPORTS = 3
"""A finding about steps must last for this many steps, and for the time of this many reports,
before it is shown, and must be gone for as long before it is removed."""

MOST_STEPS_UNTIL_NAMED = WINDOW // 2 + 1 + LASTING_STEPS
"""Steps after which a rank that has become slow is named, if reports come as fast as steps."""

SILENT_INTERVALS = 5.0
SILENT_SECONDS = 5.0
"""A rank is silent after this many intervals without a report, and never before these seconds."""

AWAITED_SECONDS = 2.0
_AWAITED_STEPS = 5.0
"""A rank is late when others wait for it for these seconds, and for the time of these steps."""

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
"""What a person may try, by kind of finding."""


@dataclass(frozen=True)
class _Sensitivity:
    """How large a difference must be to mean something about a rank."""

    slower: float  # the rank takes at least this many times as long as others
    share: float  # the difference is at least this share of a step
    patience: float  # a factor for all times to wait for a rank


_OWN_CORE = _Sensitivity(1.25, 0.1, 1.0)
_CROWDED = _Sensitivity(2.0, 0.3, 3.0)
"""If ranks outnumber cores they take turns: a rank that waits for its turn is not slow."""


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
        """Return the medians; None if there are too few steps."""
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
    """What is known about a rank when stragglers are looked for."""

    host: str
    typical: TypicalStep | None  # of its last steps
    silent: float  # seconds since its last report
    process_state: str  # the letter in /proc/<pid>/stat; empty if that cannot be read
    awaited: float = 0.0  # seconds that others have waited for it
    waiting: int = 0  # the number of ranks that wait for it
    is_crowded: bool = False  # the ranks of its host outnumber the cores

    @property
    def sensitivity(self) -> _Sensitivity:
        return _CROWDED if self.is_crowded else _OWN_CORE


@dataclass(frozen=True)
class Straggler:
    """The reason why a rank holds others up."""

    kind: str
    text: str

    @property
    def advice(self) -> str:
        """What a person may try."""
        return ADVICE[self.kind]

    @property
    def is_judged(self) -> bool:
        """Whether it follows from comparing steps; the other kinds are facts of this moment."""
        return self.kind in (BACKWARD, COMPUTE, LINK)


def find_stragglers(ranks: Mapping[int, RankView], interval: float) -> dict[int, Straggler]:
    """Return the ranks that hold others up, and why.

    Args:
        ranks: What is known about each rank.
        interval: Seconds between two reports of a rank.
    """
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
    """Return the seconds of a usual step of the job; 0 before there are enough steps."""
    totals = [view.typical.total for view in ranks if view.typical is not None]
    return statistics.median(totals) if totals else 0.0


def awaited_seconds(view: RankView, step: float) -> float:
    """Return the seconds after which a wait for a rank is shown; ``step`` is a usual step's."""
    return max(AWAITED_SECONDS * view.sensitivity.patience, _AWAITED_STEPS * step)


class Verdicts:
    """What is shown about each rank: findings that have lasted, until they are gone for good.

    Facts are removed at once. That a process is stopped or silent is shown at once, too. That
    others wait for a rank is shown if it is still true a report later: they may have gone on.
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
        """Take the findings of this moment, and return what to show about each rank.

        Args:
            found: The findings of this moment.
            steps: The number of steps that each rank has made so far.
            now: The time in seconds.
            interval: Seconds between two reports of a rank.
        """
        self._cases = {rank: self._cases.get(rank) or _Case() for rank in steps}
        for rank, case in self._cases.items():
            case.take(found.get(rank), steps[rank], now, interval)
        return {rank: case.said for rank, case in self._cases.items() if case.said is not None}


@dataclass
class _Case:
    """One rank: what is shown about it, and what is found now."""

    said: Straggler | None = None
    found: str = ""  # the kind of the present finding; empty if there is none
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
    """Return seconds for people, in about two digits."""
    if value < 0.0995:
        return f"{value * 1000:.1f} ms" if value < 0.00995 else f"{value * 1000:.0f} ms"
    return f"{value:.2g} s" if value < 9.95 else f"{value:.0f} s"
