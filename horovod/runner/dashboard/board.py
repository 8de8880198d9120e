"""The picture of a job that the page shows, made from reports and from what the launcher tells.

Pure: no clock, no files, no threads; `dashboard` feeds it from one thread. Memory is bounded,
however long the job runs. Every change has a version; `changes` gives what is newer than one.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod.runner.dashboard.events import EventLog
from horovod.runner.dashboard.reports import Report, ReportedStep, Waiting, text
from horovod.runner.dashboard.series import MetricSeries, StepSeries
from horovod.runner.dashboard.stragglers import (
    AWAITED,
    SILENT,
    STOPPED,
    RankView,
    Straggler,
    find_stragglers,
)

_WINDOW = 10  # steps that a rank is judged by
_MOST_STALLS = 8
_MOST_RANKS = 4096  # that are expected because a report says so


@dataclass
class Rank:
    """A rank of the job as it is now."""

    rank: int
    worker: str  # "w3" in an elastic job, the rank otherwise
    host: str = ""
    local_rank: int = 0
    pid: int = 0  # as the rank itself says
    launched: int = 0  # the process that the launcher started: the same, or a shell around it
    code: int | None = None  # exit code, negative after a signal
    report: Report | None = None
    heard: float = 0.0  # when its last report came
    reported_since: float = 0.0  # when the launcher last had reason to expect reports
    steps: deque[ReportedStep] = field(default_factory=functools.partial(deque, maxlen=_WINDOW))
    process_state: str = ""
    finding: Straggler | None = None
    version: int = 0
    shown: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.code is not None or (self.report is not None and self.report.state == "ended")

    @property
    def state(self) -> str:
        """One word for the page."""
        if self.code is not None:
            return "ended" if self.code == 0 else "failed"
        if self.report is None:
            return "starting"
        if self.finding is not None and self.finding.kind in (STOPPED, SILENT):
            return self.finding.kind
        if self.finding is not None:
            return "slow"
        return self.report.state

    def picture(self) -> dict[str, Any]:
        report = self.report
        stats: Mapping[str, float] = report.stats if report is not None else {}
        found: dict[str, Any] = {
            "rank": self.rank,
            "worker": self.worker,
            "host": self.host,
            "local_rank": self.local_rank,
            "pid": self.pid,
            "state": self.state,
            "code": self.code,
            "step": int(stats.get("steps", 0)),
            "rate": _rounded(stats.get("steps_per_second", 0.0)),
            "memory": int(stats.get("memory_bytes", 0)),
            "gpu_memory": int(stats.get("gpu_memory_bytes", 0)),
            "queue": int(stats.get("queue_length", 0)),
            "misses": int(stats.get("negotiation_misses", 0)),
            "bytes": int(stats.get("bytes_reduced", 0)),
            "reason": self.finding.kind if self.finding else "",
            "why": self.finding.text if self.finding else "",
        }
        if self.steps:
            count = len(self.steps)
            total = sum(step.total for step in self.steps)
            wait = sum(step.wait for step in self.steps)
            found["split"] = [
                _rounded(sum(step.compute for step in self.steps) / count),
                _rounded(wait / count),
                _rounded(sum(step.exposed for step in self.steps) / count),
            ]
            found["share"] = _rounded(wait / total) if total else 0.0
        return found


class Board:
    """Takes what becomes known, and says what a page has to show."""

    def __init__(self, title: str, now: float, interval: float, elastic: bool = False) -> None:
        self.title = text(title)
        self.started = now
        self.interval = interval
        self.elastic = elastic
        self.generation = 0
        self.ranks: dict[int, Rank] = {}
        self.events = EventLog(now)
        self.steps = StepSeries()
        self.metrics = MetricSeries()
        self.ended: dict[str, Any] | None = None
        self.version = 1
        self._structure = 1  # version at which the set of ranks changed
        self._job: dict[str, Any] = {}
        self._job_version = 1
        self._stalls: list[dict[str, Any]] = []
        self._stalls_version = 1
        self._updated = now
        self._events_seen = 0  # number of the newest that has a version
        self._pids: dict[str, int] = {}  # of the workers that run, as the launcher started them

    # -- what becomes known ----------------------------------------------------------------

    def place(self, generation: int, workers: Mapping[str, Sequence[Any]], now: float) -> None:
        """The launcher has decided who is which rank: ``{worker: [host, rank]}``."""
        before = {each.worker: each for each in self.ranks.values()}
        self.generation = generation
        ranks: dict[int, Rank] = {}
        places: dict[str, int] = {}
        for worker, (host, rank) in sorted(workers.items(), key=lambda item: item[1][1]):
            old = before.get(worker)
            local = places.setdefault(host, 0)
            places[host] = local + 1
            ranks[rank] = Rank(rank, worker, text(host), local, reported_since=now)
            ranks[rank].launched = ranks[rank].pid = self._pids.get(worker, 0)
            if old is not None:
                ranks[rank].process_state = old.process_state
        self.ranks = ranks
        self._structure = self.version = self.version + 1

    def started_worker(self, worker: str, pid: int) -> None:
        self._pids[worker] = pid
        for rank in self.ranks.values():
            if rank.worker == worker:
                rank.pid = rank.launched = pid

    def exited_worker(self, worker: str, code: int) -> Rank | None:
        """The rank that the worker was; None if it had no place."""
        self._pids.pop(worker, None)
        for rank in self.ranks.values():
            if rank.worker == worker:
                rank.code = code
                return rank
        return None

    def take_report(self, report: Report, now: float) -> None:
        """A rank wrote about itself; of a generation that is over only the charts take notice."""
        self.version += 1
        skew = now - report.time if report.time else 0.0
        self.steps.add(report.steps, skew, self.version)
        for name, points in report.metrics.items():
            self.metrics.add(name, report.rank, points, self.version)
        if report.generation < self.generation:
            return
        if report.generation > self.generation or report.rank not in self.ranks:
            self._place_from_report(report, now)
        rank = self.ranks[report.rank]
        rank.report = report
        rank.heard = now
        rank.pid = report.pid or rank.pid
        if not rank.host:
            rank.host, rank.local_rank = report.host, report.local_rank
        rank.steps.extend(report.steps)

    def _place_from_report(self, report: Report, now: float) -> None:
        """Where the launcher does not say who is who (Ray places its workers itself)."""
        if report.generation > self.generation:
            self.ranks = {}
            self.generation = report.generation
        for rank in {report.rank, *range(min(report.size, _MOST_RANKS))} - self.ranks.keys():
            self.ranks[rank] = Rank(rank, str(rank), reported_since=now)
        self.ranks = dict(sorted(self.ranks.items()))
        self._structure = self.version = self.version + 1

    def end(self, status: int | None, cause: str, account: str, now: float) -> None:
        """The job is over."""
        if self.ended is None:
            lines = [text(line, 1000) for line in account.strip("\n").split("\n")[:200]]
            self.ended = {
                "time": now,
                "status": status,
                "cause": text(cause, 1000),
                "account": lines if account.strip() else [],
            }

    # -- once a moment ---------------------------------------------------------------------

    def update(self, now: float) -> None:
        """Find stragglers and stalls, and note what has changed."""
        self._updated = now
        waiting = {
            rank.rank: rank.report.waiting
            for rank in self.ranks.values()
            if rank.report is not None and rank.report.waiting is not None and not rank.ended
        }
        if self.ended is None:
            self._judge(waiting, now)
        else:
            waiting = {}
            for rank in self.ranks.values():
                rank.finding = None
        stalls = _stalls(waiting, self.ranks, now)
        # A stall that merely goes on is told again with its new length, which the page counts.
        if stalls != self._stalls:
            self._stalls = stalls
            self._stalls_version = self.version = self.version + 1
        for rank in self.ranks.values():
            picture = rank.picture()
            if picture != rank.shown:
                rank.shown = picture
                rank.version = self.version = self.version + 1
        if self._events_seen != self.events.number:
            self._events_seen = self.events.number
            self.version += 1
        job = self._describe()
        if job != self._job:
            self._job = job
            self._job_version = self.version = self.version + 1

    def _judge(self, waiting: Mapping[int, Waiting], now: float) -> None:
        awaited: dict[int, list[float]] = {}
        for waiter, each in waiting.items():
            report = self.ranks[waiter].report
            assert report is not None, "it is what says that the rank waits"
            waited = max(report.time - each.since, 0.0) + max(now - self.ranks[waiter].heard, 0.0)
            for missing in each.missing:
                if missing != waiter:
                    awaited.setdefault(missing, []).append(waited)
        views = {
            number: RankView(
                rank.host,
                tuple(rank.steps),
                now - max(rank.heard, rank.reported_since),
                rank.process_state,
                max(awaited.get(number, [0.0])),
                len(awaited.get(number, ())),
            )
            for number, rank in self.ranks.items()
            if rank.report is not None and not rank.ended
        }
        findings = find_stragglers(views, self.interval)
        new: dict[str, dict[int, Straggler]] = {}
        well: list[int] = []
        for number, rank in self.ranks.items():
            finding = findings.get(number)
            before = rank.finding
            rank.finding = finding
            if finding is not None and (before is None or before.kind != finding.kind):
                new.setdefault(finding.kind, {})[number] = finding
            elif finding is None and before is not None and before.kind != AWAITED:
                well.append(number)
        for kind, of_kind in new.items():
            self.events.stragglers(kind, of_kind, now)
        self.events.recovered(well, now)

    def _describe(self) -> dict[str, Any]:
        running = [rank for rank in self.ranks.values() if rank.report is not None]
        rates = sorted(
            rank.report.stats.get("steps_per_second", 0.0) for rank in running if rank.report
        )
        alive = [rank for rank in self.ranks.values() if rank.code is None]
        return {
            "title": self.title,
            "started": self.started,
            "elastic": self.elastic,
            "generation": self.generation,
            "interval": self.interval,
            "size": len(self.ranks),
            "alive": len(alive),
            "hosts": len({rank.host for rank in self.ranks.values()}),
            "step": max((rank.shown.get("step", 0) for rank in running), default=0),
            "rate": _rounded(rates[len(rates) // 2]) if rates else 0.0,
            "ended": self.ended,
        }

    # -- what a page shows -----------------------------------------------------------------

    def changes(self, since: int = 0, event: int = 0) -> dict[str, Any]:
        """What is newer than a version and an event, as plain values for JSON; all for 0."""
        if not 0 < since <= self.version:
            since = event = 0
        found: dict[str, Any] = {
            "version": self.version,
            "full": since == 0,
            "now": self._updated,
        }
        if self._job_version > since:
            found["job"] = self._job
        everybody = self._structure > since
        ranks = [each.shown for each in self.ranks.values() if everybody or each.version > since]
        if ranks or everybody:
            found["ranks"] = [each for each in ranks if each]
            found["everybody"] = everybody
        if self._stalls_version > since:
            found["stalls"] = self._stalls
        steps = self.steps.changes(since)
        if steps is not None:
            found["steps"] = steps
        events = self.events.since(event)
        if events:
            found["events"] = events
        metrics = self.metrics.changes(since)
        if metrics:
            found["metrics"] = metrics
        return found


def _stalls(
    waiting: Mapping[int, Waiting], ranks: Mapping[int, Rank], now: float
) -> list[dict[str, Any]]:
    """Operations that ranks wait in, those who wait for the same one together."""
    found: dict[tuple[tuple[str, ...], tuple[int, ...]], dict[str, Any]] = {}
    for rank, each in sorted(waiting.items()):
        report = ranks[rank].report
        assert report is not None, "it is what says that the rank waits"
        since = round(each.since + (ranks[rank].heard - report.time), 1)
        entry = found.setdefault(
            (each.tensors, each.missing),
            {
                "tensors": list(each.tensors),
                "missing": list(each.missing),
                "ranks": [],
                "since": since,
                "sources": [],
            },
        )
        entry["ranks"].append(rank)
        # Reports come at other moments than they are written: what wobbles is not a change.
        entry["since"] = min(entry["since"], since)
        if each.source and each.source not in entry["sources"]:
            entry["sources"].append(each.source)
    oldest = sorted(found.values(), key=lambda entry: entry["since"])[:_MOST_STALLS]
    for entry in oldest:
        entry["since"] = round(entry["since"])
    return oldest


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
