"""Keep what happened to a job and when, and the last lines of what its workers wrote.

`board` holds an `EventLog`: workers lost and joined, generations formed, stragglers. `dashboard`
adds the launcher's events (those of --status-file) to it, and holds the `OutputTails`. Memory is
bounded: what is oldest is dropped first.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.observe.dashboard.reports import text
from horovod.observe.dashboard.stragglers import Straggler
from horovod.observe.reports.amounts import count_of
from horovod.runner.output.lines import Line
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

_KEPT_LINES = 200
_KEPT_WORKERS = 1024
_LONGEST = 400
_SAVED_LINES = 20_000  # lines of all workers together, in a saved page
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


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
        self._announce("slow", kind, {r: f": {each.text}" for r, each in findings.items()}, now)
        if len(self._announced) > 4 * _MOST:
            self._announced = {k: at for k, at in self._announced.items() if now - at < _QUIET}

    def recovered(self, ranks: Sequence[int], now: float) -> None:
        """Log ranks that do not hold others up any more."""
        told = dict.fromkeys(ranks, " keeps up again")
        self._announce("well", "", told, now, together=" keep up again")

    def _announce(
        self, kind: str, reason: str, told: Mapping[int, str], now: float, together: str = ""
    ) -> None:
        """Log what is told of each rank, except of ranks of which it was told a moment ago."""
        new = [
            rank for rank in told if now - self._announced.get((rank, reason), -_QUIET) >= _QUIET
        ]
        self._announced |= dict.fromkeys(((rank, reason) for rank in new), now)
        if len(new) > _MOST_SINGLE:  # such as all ranks of a host
            what = together or told[new[0]]
            self.add(kind, f"{len(new)} ranks ({format_ranks(new)}){what}", now)
        else:
            for rank in new:
                self.add(kind, f"rank {rank}{told[rank]}", now)

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


class OutputTails:
    """The last lines of each worker, numbered so that a page asks for newer ones only.

    The launcher's thread adds lines, and the page's thread reads them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tails: dict[int, deque[tuple[int, str, bytes]]] = {}
        self._numbers: dict[int, int] = {}

    def add(self, worker: int, stream: str, lines: Sequence[Line]) -> None:
        with self._lock:
            tail = self._tails.get(worker)
            if tail is None:
                tail = self._tails[worker] = deque(maxlen=_KEPT_LINES)
                if len(self._tails) > _KEPT_WORKERS:  # forget the oldest worker
                    self._tails.pop(next(iter(self._tails)))
            for line in lines:
                if line.end != b"\r":  # a progress bar is drawn many times a second
                    number = self._numbers[worker] = self._numbers.get(worker, 0) + 1
                    tail.append((number, stream, line.text[: 2 * _LONGEST]))

    def since(self, worker: int, number: int) -> list[list[Any]]:
        """Return number, stream and text of a worker's lines after the line with this number."""
        with self._lock:
            lines = list(self._tails.get(worker, ()))
        shown = [(n, stream, _ESCAPES.sub(b"", line)) for n, stream, line in lines if n > number]
        return [
            [n, stream, text(line.decode(errors="replace").expandtabs(8), _LONGEST)]
            for n, stream, line in shown
        ]

    def all(self) -> dict[str, list[list[Any]]]:
        """Return the last lines of all workers, for a page that is saved."""
        with self._lock:
            workers = list(self._tails)
        most = max(10, _SAVED_LINES // max(1, len(workers)))
        return {str(worker): self.since(worker, 0)[-most:] for worker in workers}
