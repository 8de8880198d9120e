"""Threads that wait for requests which another thread of the process runs. Used by channels."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waiters:
    """Those of one channel. Whoever has run something tells them, and they look again."""

    def __init__(self) -> None:
        self.number = 0
        self._progress = threading.Condition()

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until the condition is true, or for that many seconds."""
        with self._progress:
            self.number += 1
            try:
                self._progress.wait_for(condition, seconds)
            finally:
                self.number -= 1

    def tell(self) -> None:
        """A request is finished, or nobody runs rounds."""
        if self.number:
            with self._progress:
                self._progress.notify_all()
