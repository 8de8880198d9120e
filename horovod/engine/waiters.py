"""Threads that wait for requests which another thread of the process runs. Used by channels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Waiters:
    """Those of one channel. Whoever has run something tells them, and they look again."""

    def __init__(self) -> None:
        self.number = 0
        self._progress = threading.Condition()

    @contextmanager
    def joined(self) -> Iterator[Callable[[float | None], bool]]:
        """For one that waits: what lets it wait until it is told, or for so many seconds."""
        with self._progress:
            self.number += 1
            try:
                yield self._progress.wait
            finally:
                self.number -= 1

    def tell(self) -> None:
        """A request is finished, or nobody runs rounds."""
        if self.number:
            with self._progress:
                self._progress.notify_all()
