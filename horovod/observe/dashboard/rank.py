"""Describe a rank of a job as it is now. `board` holds one `Rank` for each."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from horovod.observe.dashboard.reports import Report, ReportedStep
from horovod.observe.dashboard.stragglers import SILENT, STOPPED, WINDOW, Straggler, TypicalStep

STOPPED_BY_LAUNCHER = "stopped by the launcher"


@dataclass
class Rank:
    """Everything that the board knows about a rank."""

    rank: int
    worker: str  # "w3" in an elastic job, the rank otherwise
    host: str = ""
    local_rank: int = 0
    pid: int = 0  # as the rank itself reports
    launched: int = 0  # the process that the launcher started: the same, or a shell around it
    code: int | None = None  # exit code, negative after a signal
    ended_by: str = ""  # what ended it, if it did not end by itself
    report: Report | None = None
    heard: float = 0.0  # when its last report came
    reported_since: float = 0.0  # when the launcher last had reason to expect reports
    steps: deque[ReportedStep] = field(default_factory=functools.partial(deque, maxlen=WINDOW))
    typical: TypicalStep | None = None  # the medians of these steps
    processor: float | None = None  # cores that it keeps busy, known from its second report on
    process_state: str = ""
    finding: Straggler | None = None
    version: int = 0
    shown: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.code is not None or (self.report is not None and self.report.state == "ended")

    @property
    def state(self) -> str:
        """The state of the rank in one word, for the page."""
        if self.code is not None:
            return "ended" if self.code == 0 or self.ended_by else "failed"
        if self.report is None:
            return "starting"
        if self.finding is not None and self.finding.kind in (STOPPED, SILENT):
            return self.finding.kind
        if self.finding is not None:
            return "slow"
        return self.report.state

    def take_report(self, report: Report, now: float) -> None:
        before, self.report, self.heard = self.report, report, now
        self.pid = report.pid or self.pid
        if not self.host:
            self.host, self.local_rank = report.host, report.local_rank
        if report.steps:
            self.steps.extend(report.steps)
            self.typical = TypicalStep.of(self.steps)
        if before is not None and report.time > before.time:
            spent = report.stats.get("cpu_seconds", 0.0) - before.stats.get("cpu_seconds", 0.0)
            self.processor = max(0.0, spent / (report.time - before.time))

    def steps_since(self, base: int) -> int:
        """Return the job's number of steps when this rank made its last one.

        A rank that joins later has made fewer by itself, so its own steps are added to ``base``,
        the job's number of steps when this generation began.
        """
        if self.report is None:
            return 0
        return base + max(0, int(self.report.stats.get("steps", 0)) - self.report.steps_before)

    def picture(self, base: int) -> dict[str, Any]:
        """Return what the page shows; ``base`` is as in `steps_since`."""
        stats: Mapping[str, float] = self.report.stats if self.report is not None else {}
        found: dict[str, Any] = {
            "rank": self.rank,
            "worker": self.worker,
            "host": self.host,
            "local_rank": self.local_rank,
            "pid": self.pid,
            "state": self.state,
            "code": self.code,
            "step": self.steps_since(base),
            "rate": rounded(stats.get("steps_per_second", 0.0)),
            "processor": round(self.processor or 0.0, 2),
            "memory": int(stats.get("memory_bytes", 0)),
            "gpu_memory": int(stats.get("gpu_memory_bytes", 0)),
            "queue": int(stats.get("queue_length", 0)),
            "misses": int(stats.get("negotiation_misses", 0)),
            "bytes": int(stats.get("bytes_reduced", 0)),
            "reason": self.finding.kind if self.finding else "",
            "why": self.finding.text if self.finding else self.ended_by,
            "try": self.finding.advice if self.finding else "",
        }
        if "gpu_use" in stats:
            found["gpu_use"] = round(stats["gpu_use"], 2)
        if "gpu_memory_total_bytes" in stats:
            found["gpu_memory_total"] = int(stats["gpu_memory_total_bytes"])
        typical = self.typical
        if typical is not None:
            parts = typical.compute, typical.wait, typical.exposed
            found["split"] = [rounded(part) for part in parts]
            share = typical.wait / typical.total if typical.total else 0.0
            found["share"] = rounded(min(1.0, share))
        return found


def rounded(value: float) -> float:
    """Round to four digits; more are not worth sending."""
    return float(f"{value:.4g}")
