"""Calls that end a library and may themselves hang, such as aborting it or shutting it down.

Each call runs in a thread of its own. A call that never returns would keep this rank, and with it
all others, from going on: then the process ends itself and says why. Used by the device transports.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

from horovod.common.logging import get_logger

logger = get_logger(__name__)

LONGEST = 10.0  # seconds until a call counts as hanging; NCCL takes half a second to abort
EXIT_STATUS = 70  # of a process that ends itself: "internal software error" in sysexits.h

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def finish_or_end_process(call: Callable[[], object], problem: str) -> None:
    """Run `call` in a thread. If it does not return in time, end this process and say `problem`.

    Exceptions of the call are only logged.
    """
    finished = _start(call, problem)

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
    if not _start(call, problem).wait(seconds) and seconds > 0:
        logger.warning("%s: no end after %g s", problem, seconds)


def _start(call: Callable[[], object], problem: str) -> threading.Event:
    """Run `call` in a thread, and return an event that says that it has returned."""
    # The thread takes the call out of this list, so that it also drops the library's object when
    # it is done: that may take long as well.
    calls = [call]
    finished = threading.Event()

    def run() -> None:
        try:
            calls.pop()()
        except Exception as error:
            logger.debug("%s: %s", problem, error)
        finally:
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
