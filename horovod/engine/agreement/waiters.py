"""Threads that wait while another thread of the process runs their requests. For channels."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waiters:
    """The waiting threads of one channel. A thread that has run something lets them look again."""

    def __init__(self) -> None:
        self.number = 0
        self._progress = threading.Condition()

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until the condition is true, at most `seconds`."""
        with self._progress:
            self.number += 1
            try:
                self._progress.wait_for(condition, seconds)
            finally:
                self.number -= 1

    def tell(self) -> None:
        """Wake the threads, because a request is finished, or nobody runs rounds."""
        if self.number:  # no lock needed: a thread that counts itself later looks after that
            with self._progress:
                self._progress.notify_all()
