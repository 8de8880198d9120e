"""Find the ranks that hold others up, and the reasons that the reports show.

These are pure functions. `board` calls `find_stragglers` at every update and hands the result to
`Verdicts`, which shows a finding only once it has lasted. In synchronous training all ranks have
the same step time: the slow one is the one that does *not* wait. So ranks are compared by the parts
of their last steps, by the rules that the report on a timeline has, too
(`horovod.observe.reports.slow_ranks`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.observe.dashboard.reports import ReportedStep
from horovod.observe.reports.slow_ranks import (
    BACKWARD,
    COMPUTE,
    CROWDED,
    LINK,
    LIVE,
    WHERE_TO_LOOK,
    cause_of,
    find_slow_ranks,
)

STOPPED, SILENT, AWAITED = "stopped", "silent", "awaited"
REASONS = (STOPPED, SILENT, AWAITED, BACKWARD, COMPUTE, LINK)

WINDOW = 24
"""The number of steps of a rank by which it is judged."""

FEWEST_STEPS = 3

LASTING_STEPS = 6
LASTING_REPORTS = 3
"""A finding about steps must last for this many steps, and for the time of this many reports,
before it is shown, and must be gone for as long before it is removed."""

MOST_STEPS_UNTIL_NAMED = WINDOW + LASTING_STEPS
"""Steps after which a rank that has become slow is named, if reports come as fast as steps."""

SILENT_INTERVALS = 5.0
SILENT_SECONDS = 5.0
"""A rank is silent after this many intervals without a report, and never before these seconds."""

AWAITED_SECONDS = 2.0
_AWAITED_STEPS = 5.0
"""A rank is late when others wait for it for these seconds, and for the time of these steps."""

_CROWDED_PATIENCE = 3.0
"""How many times longer a rank may take on a host where ranks outnumber cores."""

ADVICE = {
    STOPPED: "Let it go on: kill -CONT with its process number on its host, or leave the debugger.",
    SILENT: "Look whether its host answers, and what else runs there (top, dmesg).",
    AWAITED: "Look at its stack and its last output lines: a validation or a checkpoint of its "
    "own, data that comes slowly, a collective that only some ranks call.",
    **{kind: f"{where}." for kind, where in WHERE_TO_LOOK.items()},
}
"""What a person may try, by kind of finding."""


@dataclass(frozen=True)
class TypicalStep:
    """Medians of the last steps of a rank, in seconds, and the times that ranks are judged by."""

    total: float
    compute: float
    backward: float
    wait: float
    reduce: float
    exposed: float
    computes: tuple[float, ...]
    reduces: tuple[float, ...]

    @classmethod
    def of(cls, steps: Sequence[ReportedStep]) -> TypicalStep | None:
        """Return the medians; None if there are too few steps."""
        if len(steps) < FEWEST_STEPS:
            return None
        parts = ("total", "compute", "backward", "wait", "reduce", "exposed")
        return cls(
            **{part: statistics.median(getattr(step, part) for step in steps) for part in parts},
            computes=tuple(step.compute for step in steps),
            reduces=tuple(step.reduce for step in steps),
        )


@dataclass(frozen=True)
class RankView:
    """The facts about a rank by which stragglers are found."""

    host: str
    typical: TypicalStep | None  # the medians of its last steps
    silent: float  # seconds since its last report
    process_state: str  # the letter in /proc/<pid>/stat; empty if that cannot be read
    awaited: float = 0.0  # seconds that others have waited for it
    waiting: int = 0  # the number of ranks that wait for it
    is_crowded: bool = False  # the ranks of its host outnumber the cores

    @property
    def patience(self) -> float:
        """A factor by which to prolong every time limit for the rank."""
        return _CROWDED_PATIENCE if self.is_crowded else 1.0


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
    idle = {rank: _find_idle(view, interval) for rank, view in ranks.items()}
    found = {rank: finding for rank, finding in idle.items() if finding is not None}
    judged = {r: view.typical for r, view in ranks.items() if r not in found and view.typical}
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
    return max(AWAITED_SECONDS * view.patience, _AWAITED_STEPS * step)


class Verdicts:
    """Decides what to show about each rank: findings that last, until they are gone for good.

    Facts disappear at once when they end. A stopped or silent process is shown at once, too. A rank
    that others wait for is shown if they still wait one report later.
    """

    def __init__(self) -> None:
        self._cases: dict[int, _Case] = {}

    def settle(
        self, found: Mapping[int, Straggler], steps: Mapping[int, int], now: float, interval: float
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
    """The shown finding about one rank, and its present one."""

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


def _find_idle(view: RankView, interval: float) -> Straggler | None:
    others = f"; {_others_wait(view)}" if view.waiting else ""
    if view.process_state in ("T", "t"):
        how = "by a debugger" if view.process_state == "t" else "by a signal (state T)"
        return Straggler(STOPPED, f"stopped {how}{others}")
    patience = max(SILENT_SECONDS, SILENT_INTERVALS * interval) * view.patience
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
    """Return the ranks that compute, or reduce, longer than the others."""
    is_crowded = any(ranks[rank].is_crowded for rank in steps)
    step = statistics.median([each.total for each in steps.values()])
    least_gap = (CROWDED if is_crowded else LIVE).least_gap(step)
    # Reports come at different times, so the ranks' last steps need not be the same ones. What is
    # always slow shows in any of them.
    common = min(len(each.computes) for each in steps.values())
    found: dict[int, Straggler] = {}
    slow = find_slow_ranks({r: each.computes[-common:] for r, each in steps.items()}, least_gap)
    if slow is not None:
        others = [each for rank, each in steps.items() if rank not in slow.ranks]
        usual = statistics.median([each.compute for each in others])
        usual_backward = statistics.median([each.backward for each in others])
        for rank in slow.ranks:
            own = steps[rank]
            kind = cause_of(own.compute - usual, own.backward - usual_backward)
            told = f"{seconds_text(own.compute)} a step, others {seconds_text(usual)}"
            found[rank] = Straggler(kind, f"{_LATE[kind]}: computes {told}")
    if len({ranks[rank].host for rank in steps}) == 1:
        return found  # inside one host there is no link that could be slow
    slow = find_slow_ranks({r: each.reduces[-common:] for r, each in steps.items()}, least_gap)
    links = set() if slow is None else set(slow.ranks) - found.keys()
    usual = statistics.median([each.reduce for r, each in steps.items() if r not in links])
    for rank in links:
        host = ranks[rank].host
        peers = {other for other in steps if ranks[other].host == host}
        whose = f" of {host}" if links >= peers else ""
        told = f"{seconds_text(steps[rank].reduce)} a step, others {seconds_text(usual)}"
        found[rank] = Straggler(LINK, f"slow link{whose}: reduces for {told}")
    return found


_LATE = {BACKWARD: "late in backward", COMPUTE: "late before backward (input, forward)"}


def _others_wait(view: RankView) -> str:
    who = "1 rank has" if view.waiting == 1 else f"{view.waiting} ranks have"
    return f"{who} waited {seconds_text(view.awaited)} for it"


def seconds_text(value: float) -> str:
    """Return seconds for people, in about two digits."""
    if value < 0.0995:
        return f"{value * 1000:.1f} ms" if value < 0.00995 else f"{value * 1000:.0f} ms"
    return f"{value:.2g} s" if value < 9.95 else f"{value:.0f} s"
