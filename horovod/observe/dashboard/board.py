"""Make the picture of a job that the page shows, from the ranks' reports and the launcher's events.

The board has no clock, no files and no threads; `dashboard` calls it from one thread. Its memory is
bounded, however long the job runs. Every change gets a version, and `changes` returns what is newer
than a version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horovod.observe.dashboard.logs import EventLog
from horovod.observe.dashboard.rank import Rank, rounded
from horovod.observe.dashboard.reports import Report, Waiting, text
from horovod.observe.dashboard.series import MetricSeries, RankHistory, StepSeries
from horovod.observe.dashboard.stragglers import (
    AWAITED,
    RankView,
    Straggler,
    Verdicts,
    awaited_seconds,
    find_stragglers,
    usual_step,
)
from horovod.observe.reports.slow_ranks import describe_crowded, find_crowded
from horovod.runner.slots.worker_env import CROWDED_ADVICE

_MOST_STALLS = 8
_MOST_HISTORIES = 1024  # workers whose history is kept; higher ranks have none
_MOST_RANKS = 4096  # ranks that are expected because a report says so


class Board:
    """Takes reports and events, and says what a page has to show."""

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
        self.histories: dict[str, RankHistory] = {}  # by worker
        self.stacks: dict[str, dict[str, Any]] = {}  # by worker: its stack when others waited
        self.awaited: dict[int, float] = {}  # ranks that others wait for, and the seconds so far
        self.crowded = ""  # a sentence about ranks that outnumber cores
        self.ended: dict[str, Any] | None = None
        self.version = 1
        self._verdicts = Verdicts()
        self._base = 0  # the job's number of steps when this generation began
        self._structure = 1  # version at which the set of ranks changed
        self._job: dict[str, Any] = {}
        self._job_version = 1
        self._stalls: list[dict[str, Any]] = []
        self._stalls_version = 1
        self._updated = now
        self._events_seen = 0  # the number of the newest event that has a version
        self._failed: set[str] = set()  # workers of an elastic job that failed by themselves
        self._pids: dict[str, int] = {}  # of the workers that run, as the launcher started them

    # -- reports and events ----------------------------------------------------------------

    def take_decision(
        self, generation: int, workers: Mapping[str, Sequence[Any]], now: float
    ) -> None:
        """Take the launcher's decision on ranks, ``{worker: [host, rank]}``."""
        before = {each.worker: each for each in self.ranks.values()}
        self._begin(generation)
        ranks: dict[int, Rank] = {}
        local_sizes: dict[str, int] = {}
        for worker, (host, rank) in sorted(workers.items(), key=lambda item: item[1][1]):
            local = local_sizes.setdefault(host, 0)
            local_sizes[host] = local + 1
            pid = self._pids.get(worker, 0)
            ranks[rank] = Rank(rank, worker, text(host), local, pid, pid, reported_since=now)
            if worker in before:
                ranks[rank].process_state = before[worker].process_state
        self.ranks = ranks
        gone = [worker for worker in self.histories if worker not in workers]
        for worker in gone[: max(0, len(gone) + len(workers) - _MOST_HISTORIES)]:
            del self.histories[worker]
        self._structure = self.version = self.version + 1

    def _rank_of(self, worker: str) -> Rank | None:
        return next((rank for rank in self.ranks.values() if rank.worker == worker), None)

    def started_worker(self, worker: str, pid: int) -> None:
        self._pids[worker] = pid
        rank = self._rank_of(worker)
        if rank is not None:
            rank.pid = rank.launched = pid

    def exited_worker(self, worker: str, code: int, ended_by: str = "") -> Rank | None:
        """Note that a worker has ended.

        Args:
            worker: The worker's name.
            code: Its exit code, negative after a signal.
            ended_by: What ended it, if it has not failed by itself.

        Returns:
            Its rank; None if it had none.
        """
        self._pids.pop(worker, None)
        rank = self._rank_of(worker)
        if rank is not None:
            rank.code = code
            rank.ended_by = "" if worker in self._failed else ended_by
        return rank

    def mark_failed(self, worker: str, because_of: str = "") -> None:
        """Note that a worker of an elastic job has failed; ``because_of`` names another cause."""
        if not because_of:
            self._failed.add(worker)
        rank = self._rank_of(worker)
        if rank is not None:
            rank.ended_by = because_of

    def blame(self, ranks: Sequence[int], others: str) -> None:
        """Note which ranks made the job fail; ``others`` describes ranks that ended with them."""
        for rank in self.ranks.values():
            if rank.rank in ranks:
                rank.ended_by = ""
            elif rank.code:
                rank.ended_by = rank.ended_by or others

    def take_stack(self, worker: str, lines: Sequence[str], now: float) -> None:
        """Take the stack of a worker."""
        self.stacks[worker] = {"time": now, "lines": [text(line) for line in lines[:400]]}
        while len(self.stacks) > _MOST_HISTORIES:
            self.stacks.pop(next(iter(self.stacks)))
        self.version += 1

    def take_report(self, report: Report, now: float) -> None:
        """Take the report of a rank; a report of an old generation only adds to the charts."""
        self.version += 1
        skew = now - report.time if report.time else 0.0
        self.steps.add_steps(report.steps, skew, self.version)
        for name, points in report.metrics.items():
            self.metrics.add(name, report.rank, points, self.version)
        if report.generation < self.generation:
            return
        if report.generation > self.generation or report.rank not in self.ranks:
            self._add_ranks_of_report(report, now)
        rank = self.ranks[report.rank]
        rank.take_report(report, now)
        self._base = max(self._base, report.steps_before)
        if rank.rank < _MOST_HISTORIES:
            history = self.histories.setdefault(rank.worker, RankHistory())
            history.take(report, rank.processor, now, self.version)

    def _begin(self, generation: int) -> None:
        """Begin a generation, whose steps are counted from the job's number of steps on."""
        made = [rank.steps_since(self._base) for rank in self.ranks.values()]
        self._base = max([self._base, *made])
        self.generation = generation

    def _add_ranks_of_report(self, report: Report, now: float) -> None:
        """Add ranks that a report mentions, for launchers that announce no ranks, such as Ray's."""
        if report.generation > self.generation:
            self._begin(report.generation)
            self.ranks = {}
        for rank in {report.rank, *range(min(report.size, _MOST_RANKS))} - self.ranks.keys():
            self.ranks[rank] = Rank(rank, str(rank), reported_since=now)
        self.ranks = dict(sorted(self.ranks.items()))
        self._structure = self.version = self.version + 1

    def end(self, status: int | None, cause: str, account: str, now: float) -> None:
        """Note that the job is over."""
        if self.ended is None:
            lines = [text(line, 1000) for line in account.strip("\n").split("\n")[:200]]
            self.ended = {
                "time": now,
                "status": status,
                "cause": text(cause, 1000),
                "account": lines if account.strip() else [],
            }

    # -- updates ---------------------------------------------------------------------------

    def update(self, now: float) -> None:
        """Find stragglers and stalls, and give versions to what has changed."""
        self._updated = now
        crowded = find_crowded(
            {number: rank.host for number, rank in self.ranks.items()},
            {number: rank.report.cores for number, rank in self.ranks.items() if rank.report},
        )
        self.crowded = describe_crowded(crowded, len(self._hosts()))
        stalls: list[dict[str, Any]] = []
        self.awaited = {}
        if self.ended is None:
            waiting = {
                rank.rank: rank.report.waiting
                for rank in self.ranks.values()
                if rank.report is not None and rank.report.waiting is not None and not rank.ended
            }
            long_waits = self._judge(waiting, {each.host for each in crowded}, now)
            stalls = _stalls(long_waits, self.ranks)
        else:
            for rank in self.ranks.values():
                rank.finding = None
        # A stall that merely goes on is no change: the page itself counts its seconds.
        if stalls != self._stalls:
            self._stalls = stalls
            self._stalls_version = self.version = self.version + 1
        for rank in self.ranks.values():
            picture = rank.picture(self._base)
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

    def _judge(
        self, waiting: Mapping[int, Waiting], crowded: set[str], now: float
    ) -> dict[int, Waiting]:
        """Find ranks that hold others up; return the waits that are long enough to be shown."""
        waited = {rank: self._waited(rank, each, now) for rank, each in waiting.items()}
        awaited: dict[int, list[float]] = {}
        for waiter, each in waiting.items():
            for missing in each.missing:
                if missing != waiter:
                    awaited.setdefault(missing, []).append(waited[waiter])
        views = {
            number: RankView(
                rank.host,
                rank.typical,
                now - max(rank.heard, rank.reported_since),
                rank.process_state,
                max(awaited.get(number, [0.0])),
                len(awaited.get(number, ())),
                rank.host in crowded,
            )
            for number, rank in self.ranks.items()
            if rank.report is not None and not rank.ended
        }
        steps = {number: self.ranks[number].steps_since(self._base) for number in views}
        findings = self._verdicts.settle(
            find_stragglers(views, self.interval), steps, now, self.interval
        )
        self._announce(findings, now)
        usual = usual_step(views.values())
        self.awaited = {
            number: view.awaited
            for number, view in views.items()
            if view.waiting and view.awaited >= awaited_seconds(view, usual)
        }
        return {
            rank: each
            for rank, each in waiting.items()
            if waited[rank] >= awaited_seconds(views[rank], usual)
        }

    def _waited(self, rank: int, waiting: Waiting, now: float) -> float:
        """Return the seconds for which a rank has waited, even if its clock differs from ours."""
        report = self.ranks[rank].report
        assert report is not None, "it is what says that the rank waits"
        return max(report.time - waiting.since, 0.0) + max(now - self.ranks[rank].heard, 0.0)

    def _announce(self, findings: Mapping[int, Straggler], now: float) -> None:
        new: dict[str, dict[int, Straggler]] = {}
        well: list[int] = []
        for number, rank in self.ranks.items():
            finding, before = findings.get(number), rank.finding
            rank.finding = finding
            if finding is not None and (before is None or before.kind != finding.kind):
                new.setdefault(finding.kind, {})[number] = finding
            is_over = finding is None and before is not None and before.kind != AWAITED
            if is_over and not rank.ended:
                well.append(number)
        for kind, of_kind in new.items():
            self.events.stragglers(kind, of_kind, now)
        self.events.recovered(well, now)

    def _hosts(self) -> set[str]:
        return {rank.host for rank in self.ranks.values()}

    def _describe(self) -> dict[str, Any]:
        ranks = self.ranks.values()
        rates = sorted(r.report.stats.get("steps_per_second", 0.0) for r in ranks if r.report)
        return {
            "title": self.title,
            "started": self.started,
            "elastic": self.elastic,
            "generation": self.generation,
            "interval": self.interval,
            "size": len(self.ranks),
            "alive": sum(rank.code is None for rank in ranks),
            "hosts": len(self._hosts()),
            "step": max((rank.shown.get("step", 0) for rank in ranks if rank.report), default=0),
            "rate": rounded(rates[len(rates) // 2]) if rates else 0.0,
            "crowded": self.crowded,
            "crowded_try": CROWDED_ADVICE if self.crowded else "",
            "ended": self.ended,
        }

    # -- what a page shows -----------------------------------------------------------------

    def changes(self, since: int = 0, event: int = 0) -> dict[str, Any]:
        """Return what is newer than a version and an event, as plain values for JSON.

        Args:
            since: A version of the board; 0 asks for everything.
            event: The number of the newest event that is known.
        """
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

    def rank_changes(self, worker: str, since: int = 0) -> dict[str, Any]:
        """Return the history of one worker after a version, and its last known stack."""
        history = self.histories.get(worker)
        found = history.changes(since) if history is not None else {"steps": None, "use": None}
        return {"version": self.version, **found, "stack": self.stacks.get(worker)}

    def all_ranks(self) -> dict[str, dict[str, Any]]:
        """Return history and stack of all workers, for a page that is saved."""
        return {worker: self.rank_changes(worker) for worker in self.histories}


def _stalls(waiting: Mapping[int, Waiting], ranks: Mapping[int, Rank]) -> list[dict[str, Any]]:
    """Return the operations in which ranks wait, each once with all its ranks."""
    groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[tuple[int, float, str]]] = {}
    for rank, each in sorted(waiting.items()):
        report = ranks[rank].report
        assert report is not None, "it is what says that the rank waits"
        since = round(each.since + (ranks[rank].heard - report.time), 1)
        groups.setdefault((each.tensors, each.missing), []).append((rank, since, each.source))
    stalls: list[dict[str, Any]] = [
        {
            "tensors": list(tensors),
            "missing": list(missing),
            "ranks": [rank for rank, _, _ in group],
            # Rounded: otherwise the varying delay of reports would look like a change.
            "since": round(min(since for _, since, _ in group)),
            "sources": list(dict.fromkeys(source for _, _, source in group if source)),
        }
        for (tensors, missing), group in groups.items()
    ]
    return sorted(stalls, key=lambda stall: stall["since"])[:_MOST_STALLS]
