"""Keep the last output lines of every worker for the page.

The launcher's thread adds lines, and the page's thread reads them. Memory is bounded, per worker
and in the number of workers.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from horovod.observe.dashboard.reports import text
from horovod.runner.output.lines import Line

_KEPT_LINES = 200
_KEPT_WORKERS = 1024
_LONGEST = 400
_SAVED_LINES = 20_000  # lines of all workers together, in a saved page
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class OutputTails:
    """The last lines of each worker, numbered so that a page asks for newer ones only."""

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
        return [[at, stream, _shown(line)] for at, stream, line in lines if at > number]

    def all(self) -> dict[str, list[list[Any]]]:
        """Return the last lines of all workers, for a page that is saved."""
        with self._lock:
            workers = list(self._tails)
        most = max(10, _SAVED_LINES // max(1, len(workers)))
        return {str(worker): self.since(worker, 0)[-most:] for worker in workers}


def _shown(line: bytes) -> str:
    return text(_ESCAPES.sub(b"", line).decode(errors="replace").expandtabs(8), _LONGEST)
