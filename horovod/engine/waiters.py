"""Threads that wait for requests which another thread of the process runs. Used by channels."""

from __future__ import annotations

import threading
from collections.abc import Callable

from horovod.observe.statistics.counters import Counters


class Waiters:
    """Those of one channel. Whoever has run something tells them, and they look again."""

    def __init__(self, counters: Counters | None = None) -> None:
        self.number = 0
        self._counters = counters
        self._progress = threading.Condition()

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until it is true, or for so long.

        What the background thread does meanwhile is waited for, not hidden.
        """
        counters = self._counters
        with self._progress:
            self.number += 1
            before = 0.0 if counters is None else counters.in_background()
            try:
                self._progress.wait_for(condition, seconds)
            finally:
                self.number -= 1
                if counters is not None:
                    counters.awaited += counters.in_background() - before

    def tell(self) -> None:
        """A request is finished, or nobody runs rounds."""
        if self.number:
            with self._progress:
                self._progress.notify_all()
