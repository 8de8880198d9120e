"""The thread of a channel that runs rounds for which nobody waits.

It is started with the first asynchronous request, and sleeps while the queue is empty.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from horovod.engine.agreement.request_queue import RequestQueue

_LONGEST_GATHERING = 5  # cycles that the thread waits while requests keep coming
_ENOUGH = 1 << 17  # bytes that are worth a round of their own
_LONGEST_END = 60.0  # seconds that the end of the process waits for a round in progress

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of all channels


def finish_threads() -> None:
    """Wait for background threads that outlived their channel, at the end of the process.

    Python ends threads that are left by unwinding their stack. One that is in an operation of torch
    then aborts the process ("terminate called without an active exception").
    """
    deadline = time.monotonic() + _LONGEST_END
    for thread in list(_threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


class BackgroundThread:
    """Runs rounds while there are requests, from `ring` to `close`."""

    def __init__(
        self, name: str, queue: RequestQueue, cycle: float, core: int | None = None
    ) -> None:
        self.rung = threading.Event()  # set: no need to ring again
        self.cycle = cycle  # seconds
        self._name = name
        self._queue = queue
        self._core = core
        self._starting = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def ring(self, run_round: Callable[[], None]) -> None:
        """Start or wake the thread, which alone keeps `run_round`, until it ends."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(run_round,), name=self._name, daemon=True
                )
                _threads.add(self._thread)
                self._thread.start()
        self.rung.set()

    def close(self) -> None:
        """Let the thread end after the round in progress; see `join`."""
        self._closed.set()
        self.rung.set()

    def join(self, timeout: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self, run_round: Callable[[], None]) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})  # of this thread alone
        while not self._closed.is_set():
            self.rung.wait()
            if self._queue.requests:
                self._let_gather()
            self.rung.clear()  # before looking at the queue: a ring after the look would be lost
            while self._queue.requests and not self._closed.is_set():
                run_round()

    def _let_gather(self) -> None:
        """Wait while small requests keep coming: one round serves many, and disturbs nobody."""
        for _ in range(_LONGEST_GATHERING):
            if self._is_enough():
                return
            before = len(self._queue.requests)
            time.sleep(self.cycle)
            if len(self._queue.requests) <= before or self._closed.is_set():
                return

    def _is_enough(self) -> bool:
        """Return whether requests are worth a round already: a wait for more would hold them up."""
        requests = self._queue.copy()
        return sum(tensor.nbytes for each in requests for tensor in each.tensors) >= _ENOUGH
