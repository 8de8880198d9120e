"""Describe the progress of a job in one line on the terminal (``--progress``).

`run_job` makes a `StatusLine`. It gets the same reports from the ranks as the dashboard and judges
them by the same rules, so both call the same ranks slow. `output.progress` shows the line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from horovod.common.store import MemoryStore
from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.processes import ProcessStates
from horovod.observe.dashboard.reports import ReportQueue
from horovod.observe.dashboard.stragglers import SILENT, STOPPED
from horovod.observe.dashboard.watching import INTERVAL
from horovod.observe.reports.amounts import count_of
from horovod.observe.reports.slow_ranks import BACKWARD, COMPUTE, LINK
from horovod.runner.output.report import format_ranks
from horovod.runner.output.watcher import JobWatcher

_REPORT_SECONDS = 1.0  # between two reports of a rank
_LONG_WAIT = 3.0  # seconds; shorter waits for a rank are not worth a word
_REASONS = {
    STOPPED: "is stopped",
    SILENT: "is silent",
    BACKWARD: "is slow in backward",
    COMPUTE: "is slow before backward",
    LINK: "has a slow link",
}
"""Short descriptions of a slow rank. Other reasons, such as a short wait, are not worth a word."""


class StatusLine(JobWatcher):
    """Collects reports in the store's threads, and makes the line in the launcher's."""

    def __init__(self, store: MemoryStore, environ: Mapping[str, str], elastic: bool) -> None:
        self._interval = float(environ.get(INTERVAL) or _REPORT_SECONDS)
        self._board = Board("", time.time(), self._interval, elastic)
        self._states = ProcessStates()
        self._reports = ReportQueue(store)

    def variables(self) -> dict[str, str]:
        return {INTERVAL: f"{self._interval:g}"}

    def note(self, event: str, **details: Any) -> None:
        if event == "decision":
            self._board.take_decision(int(details["number"]), details["workers"], time.time())
        elif event == "started":
            self._board.started_worker(str(details["worker"]), int(details["pid"]))
        elif event == "exited":
            self._board.exited_worker(str(details["worker"]), int(details["code"]))

    def status(self) -> str:
        for at, report in self._reports.take():
            self._board.take_report(report, at)
        self._states.look(self._board)
        self._board.update(time.time())
        return describe(self._board.changes())


def describe(picture: Mapping[str, Any]) -> str:
    """Return the line for a picture of `Board.changes`; empty before the first step."""
    job = picture.get("job", {})
    if not job.get("step"):
        return ""
    of = "" if job["alive"] == job["size"] else f"{job['alive']} of "
    ranks = f"{of}{count_of(job['size'], 'rank')}"
    parts = [f"step {job['step']}, {job['rate']:.3g} steps/s, {ranks}"]
    slow: dict[str, list[int]] = {}
    for rank in picture.get("ranks", ()):
        if rank["reason"] in _REASONS:
            slow.setdefault(rank["reason"], []).append(rank["rank"])
    parts += [f"rank {format_ranks(which)} {_REASONS[reason]}" for reason, which in slow.items()]
    for stall in picture.get("stalls", ()):
        waited = picture["now"] - stall["since"]
        if waited >= _LONG_WAIT and stall["missing"]:
            parts.append(f"{waited:.0f} s waiting for rank {format_ranks(stall['missing'])}")
    return "; ".join(parts)
