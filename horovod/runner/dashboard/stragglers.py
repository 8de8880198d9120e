"""Which ranks hold the others up, and why, as far as the reports tell.

Pure functions; `board` calls `find_stragglers` every time it is brought up to date. In synchronous
training all ranks have the same step time: the slow one is the one that does *not* wait. So ranks
are compared by what their steps are made of.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from horovod.runner.dashboard.reports import ReportedStep

STOPPED, SILENT, AWAITED = "stopped", "silent", "awaited"
BACKWARD, COMPUTE, LINK = "backward", "compute", "link"
REASONS = (STOPPED, SILENT, AWAITED, BACKWARD, COMPUTE, LINK)

_FEWEST_STEPS = 3
_SLOWER = 1.25
"""A rank is slow when it takes this many times as long as ranks usually do ..."""
_SHARE_OF_STEP = 0.1
"""... and that is at least this share of the step: less is noise ..."""
_LEAST_SECONDS = 0.002
"""... and more than timers and schedulers do by themselves."""

SILENT_INTERVALS = 5.0
SILENT_SECONDS = 5.0
"""A rank is silent after this many intervals without a report, and never before these seconds."""


@dataclass(frozen=True)
class RankView:
    """What is known of a rank when stragglers are looked for."""

    host: str
    steps: Sequence[ReportedStep]  # the last ones, oldest first
    silent: float  # seconds since its last report
    process_state: str  # letter of /proc/<pid>/stat; empty where that cannot be read
    awaited: float = 0.0  # seconds that others have waited for it
    waiting: int = 0  # how many others


@dataclass(frozen=True)
class Straggler:
    """Why a rank holds the others up."""

    kind: str
    text: str


def find_stragglers(ranks: Mapping[int, RankView], interval: float) -> dict[int, Straggler]:
    """The ranks that hold others up, by rank. ``interval``: seconds between two reports."""
    found: dict[int, Straggler] = {}
    for rank, view in ranks.items():
        finding = _is_not_running(view, interval)
        if finding is not None:
            found[rank] = finding
    steps = {
        rank: view.steps
        for rank, view in ranks.items()
        if rank not in found and len(view.steps) >= _FEWEST_STEPS
    }
    if len(steps) > 1:
        found |= _slow_steps(steps, {rank: ranks[rank].host for rank in steps})
    for rank, view in ranks.items():
        if rank not in found and view.waiting:
            found[rank] = Straggler(AWAITED, f"late in this step: {_others_wait(view)}")
    return found


def _is_not_running(view: RankView, interval: float) -> Straggler | None:
    others = f"; {_others_wait(view)}" if view.waiting else ""
    if view.process_state in ("T", "t"):
        how = "by a debugger" if view.process_state == "t" else "by a signal (state T)"
        return Straggler(STOPPED, f"stopped {how}{others}")
    if view.silent <= max(SILENT_SECONDS, SILENT_INTERVALS * interval):
        return None
    guess = {
        "D": "waits for a disk or a file server (state D)",
        "Z": "has ended",
        "": "stopped, too busy, or its host cannot be reached",
    }.get(view.process_state, "its Python does not get to run")
    return Straggler(SILENT, f"no report for {_seconds(view.silent)}: {guess}{others}")


def _slow_steps(
    steps: Mapping[int, Sequence[ReportedStep]], hosts: Mapping[int, str]
) -> dict[int, Straggler]:
    found: dict[int, Straggler] = {}
    total = _means(steps, lambda step: step.total)
    compute = _means(steps, lambda step: step.compute)
    backward = _means(steps, lambda step: step.backward)
    reduce = _means(steps, lambda step: step.reduce)
    usual_compute = statistics.median_low(compute.values())
    usual_backward = statistics.median_low(backward.values())
    usual_reduce = statistics.median_low(reduce.values())
    slow_links = set()
    for rank in steps:
        excess = compute[rank] - usual_compute
        if _is_slow(compute[rank], usual_compute, total[rank]):
            in_backward = backward[rank] - usual_backward > excess / 2
            where = "late in backward" if in_backward else "late before backward (input, forward)"
            kind = BACKWARD if in_backward else COMPUTE
            found[rank] = Straggler(
                kind,
                f"{where}: computes {_seconds(compute[rank])} a step, others "
                f"{_seconds(usual_compute)}",
            )
        elif _is_slow(reduce[rank], usual_reduce, total[rank]):
            slow_links.add(rank)
    for rank in slow_links:
        peers = [other for other in steps if hosts[other] == hosts[rank]]
        several = len(set(hosts.values())) > 1
        whose = f" of {hosts[rank]}" if several and slow_links >= set(peers) else ""
        found[rank] = Straggler(
            LINK,
            f"slow link{whose}: reduces for {_seconds(reduce[rank])} a step, others "
            f"{_seconds(usual_reduce)}",
        )
    return found


def _means(
    steps: Mapping[int, Sequence[ReportedStep]], part: Callable[[ReportedStep], float]
) -> dict[int, float]:
    return {rank: statistics.fmean(map(part, each)) for rank, each in steps.items()}


def _is_slow(own: float, usual: float, step: float) -> bool:
    return own > _SLOWER * usual and own - usual > max(_LEAST_SECONDS, _SHARE_OF_STEP * step)


def _others_wait(view: RankView) -> str:
    who = "1 rank has" if view.waiting == 1 else f"{view.waiting} ranks have"
    return f"{who} waited {_seconds(view.awaited)} for it"


def _seconds(value: float) -> str:
    if value < 0.0995:
        return f"{value * 1000:.1f} ms" if value < 0.00995 else f"{value * 1000:.0f} ms"
    return f"{value:.2g} s" if value < 9.95 else f"{value:.0f} s"
