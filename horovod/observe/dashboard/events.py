"""Log what happened to a job and when: workers lost and joined, generations formed, stragglers.

`board` holds an `EventLog`, and `dashboard` adds the launcher's events (those of --status-file) to
it. Its memory is bounded: the oldest events are dropped first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.observe.dashboard.reports import text
from horovod.observe.dashboard.stragglers import Straggler
from horovod.observe.reports.amounts import count_of
from horovod.runner.output.report import format_ranks

_MOST = 400
_QUIET = 20.0
"""Seconds within which the same straggler is not logged again: some come and go with every step."""

_MOST_SINGLE = 4
_KIND_OF_EVENT = {
    "host failed": "lost",
    "host left": "host",
    "blacklisted": "host",
    "waiting": "host",
    "starting": "host",
}


class EventLog:
    """A log of numbered events."""

    def __init__(self, now: float) -> None:
        self.number = 0
        self.totals: dict[str, int] = {}  # by kind, including events that were dropped
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST)
        self._announced: dict[tuple[int, str], float] = {}
        self._trouble: float | None = now  # when the last generation broke; None while one works
        self._workers: dict[str, tuple[str, int]] = {}  # of the newest decision
        self._decision: int | None = None

    def add(self, kind: str, what: str, now: float, worker: str = "") -> None:
        self.number += 1
        self.totals[kind] = self.totals.get(kind, 0) + 1
        self._events.append(
            {
                "number": self.number,
                "time": round(now, 2),
                "kind": kind,
                "text": text(what, 500),
                "worker": worker,
            }
        )

    def since(self, number: int) -> list[dict[str, Any]]:
        if number > self.number:
            number = 0
        return [event for event in self._events if event["number"] > number]

    # -- stragglers ------------------------------------------------------------------------

    def stragglers(self, kind: str, findings: Mapping[int, Straggler], now: float) -> None:
        """Log ranks that begin to hold others up, all for the same kind of reason."""
        new = {
            rank: finding
            for rank, finding in findings.items()
            if now - self._announced.get((rank, kind), -_QUIET) >= _QUIET
        }
        self._announced |= dict.fromkeys(((rank, kind) for rank in new), now)
        if len(new) > _MOST_SINGLE:  # such as all ranks of a host
            first = next(iter(new.values()))
            self.add("slow", f"{len(new)} ranks ({format_ranks(list(new))}): {first.text}", now)
        else:
            for rank, finding in new.items():
                self.add("slow", f"rank {rank}: {finding.text}", now)
        if len(self._announced) > 4 * _MOST:
            self._announced = {k: at for k, at in self._announced.items() if now - at < _QUIET}

    def recovered(self, ranks: Sequence[int], now: float) -> None:
        """Log ranks that do not hold others up any more."""
        new = [rank for rank in ranks if now - self._announced.get((rank, ""), -_QUIET) >= _QUIET]
        self._announced |= dict.fromkeys(((rank, "") for rank in new), now)
        if len(new) > _MOST_SINGLE:
            self.add("well", f"{len(new)} ranks ({format_ranks(new)}) keep up again", now)
        else:
            for rank in new:
                self.add("well", f"rank {rank} keeps up again", now)

    # -- events of the launcher ------------------------------------------------------------

    def decision(
        self, number: int, workers: Mapping[str, tuple[str, int]], message: str, now: float
    ) -> None:
        """Log the launcher's decision on the workers of the next generation."""
        if self._decision is not None:
            for name, (host, rank) in workers.items():
                if name not in self._workers:
                    self.add("joined", f"{name} on {host} joins as rank {rank}", now, name)
            if self._trouble is None:
                self._trouble = now
            self.add("decision", message, now)
        self._workers = dict(workers)
        self._decision = number

    def formed(self, number: int, now: float) -> None:
        """Log that the workers of a decision have formed a generation."""
        if number != self._decision or self._trouble is None:
            return
        count = count_of(len(self._workers), "worker")
        again = "re-formed" if number > 1 else "formed"
        self.add("formed", f"{again} with {count} in {now - self._trouble:.1f} s", now)
        self._trouble = None

    def lost(self, worker: str, host: str, how: str, now: float) -> None:
        if self._trouble is None:
            self._trouble = now
        _, rank = self._workers.get(worker, ("", None))
        who = f"rank {rank}" if rank is not None else worker
        if rank is not None and worker != str(rank):
            who += f" ({worker})"
        self.add("lost", f"{who} on {host} lost: {how}", now, worker)

    def take_message(self, event: str, details: Mapping[str, Any], now: float) -> None:
        """Log any other event that has a message for people."""
        message = details.get("message")
        if event in _KIND_OF_EVENT and isinstance(message, str):
            self.add(_KIND_OF_EVENT[event], message, now)
