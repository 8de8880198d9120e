"""Calls that end a library and may themselves hang, such as aborting it or shutting it down.

Each call runs in a thread of its own. A call that never returns would keep this rank, and with it
all others, from going on: then the process ends itself and says why. Used by the device transports.

Such a call waits for the whole device, which spoils a CUDA graph that another thread captures at
that moment. So captures and endings take turns (`none_under_way`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from horovod.common.logging import get_logger

logger = get_logger(__name__)

LONGEST = 10.0  # seconds until a call counts as hanging; NCCL takes half a second to abort
EXIT_STATUS = 70  # of a process that ends itself: "internal software error" in sysexits.h

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class _Turns:
    """Lets calls that end something run, any number of them, or one block that wants quiet.

    A garbage collection may begin a call at any point of this thread, so the lock is reentrant.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._calls = 0  # calls that are under way
        self._is_quiet = False

    def begin(self, at_once: bool) -> bool:
        """Count a call as under way, unless a block wants quiet; return whether it is counted.

        A call that goes on `at_once` is counted even then.
        """
        with self._changed:
            if self._is_quiet and not at_once:
                return False
            self._calls += 1
            return True

    def await_begin(self) -> None:
        """Wait until no block wants quiet any more, and count a call as under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_quiet)
            self._calls += 1

    def end(self) -> None:
        """Count a call as ended."""
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Wait until no call is under way, and let none begin inside the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._calls and not self._is_quiet, LONGEST)
            self._is_quiet = True
        try:
            yield
        finally:
            with self._changed:
                self._is_quiet = False
                self._changed.notify_all()


_turns = _Turns()
none_under_way = _turns.quiet


def finish_or_end_process(call: Callable[[], object], problem: str) -> None:
    """Run `call` in a thread. If it does not return in time, end this process and say `problem`.

    Exceptions of the call are only logged. It does not wait for the end of a capture: a rank is
    lost, and the others wait.
    """
    finished = _start(call, problem, at_once=True)

    def watch() -> None:
        if not finished.wait(LONGEST):
            _end_process(problem)

    thread = threading.Thread(target=watch, name="hvd-farewell-watch", daemon=True)
    _threads.add(thread)
    thread.start()


def finish_or_leave(call: Callable[[], object], problem: str, seconds: float = LONGEST) -> None:
    """Run `call` in a thread, and wait at most `seconds` for it; then leave it behind.

    This is for calls that no other rank waits for. Exceptions of the call are only logged.
    """
    if not _start(call, problem, at_once=False).wait(seconds) and seconds > 0:
        logger.warning("%s: no end after %g s", problem, seconds)


def _start(call: Callable[[], object], problem: str, at_once: bool) -> threading.Event:
    """Run `call` in a thread, and return an event that says that it has returned.

    Unless it is to run `at_once`, it waits while `none_under_way` is in use.
    """
    # The thread takes the call out of this list, so that it also drops the library's object when
    # it is done: that may take long as well.
    calls = [call]
    finished = threading.Event()
    has_begun = _turns.begin(at_once)

    def run() -> None:
        if not has_begun:
            _turns.await_begin()
        try:
            calls.pop()()
        except Exception as error:
            logger.debug("%s: %s", problem, error)
        finally:
            _turns.end()
            finished.set()

    thread = threading.Thread(target=run, name="hvd-farewell", daemon=True)
    _threads.add(thread)
    thread.start()
    return finished


def await_farewells() -> None:
    """Wait until all such calls have ended, at the end of the process.

    Python would otherwise end their threads inside the library, which crashes the process.
    """
    deadline = time.monotonic() + LONGEST
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def _end_process(problem: str) -> None:
    """End this process at once, without any cleanup that could hang too."""
    print(
        f"{problem}: no end after {LONGEST:g} s. This process (pid {os.getpid()}) ends itself, so "
        f"that the other ranks need not wait for it.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_STATUS)
