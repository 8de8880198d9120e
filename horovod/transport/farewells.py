"""Calls that end something and may hang themselves: aborting or shutting down a library.

Each runs in a thread of its own. One that does not return in time would keep this rank, and with
it all others, from going on: then the process ends itself and says why. Used by the device
transports.
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
EXIT_STATUS = 70  # of a process that gives itself up: "internal software error"

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def finish_or_end_process(call: Callable[[], object], problem: str) -> None:
    """Run `call` in a thread. If it does not return in time, this process ends and says `problem`.

    What it raises is of no interest any more.
    """
    finished = _start(call, problem)

    def watch() -> None:
        if not finished.wait(LONGEST):
            _end_process(problem)

    thread = threading.Thread(target=watch, name="hvd-farewell-watch", daemon=True)
    _threads.add(thread)
    thread.start()


def finish_or_leave(call: Callable[[], object], problem: str, seconds: float = LONGEST) -> None:
    """Run `call` in a thread and wait for it, but for no longer than that: then it is left behind.

    For what nobody else waits for. What it raises is of no interest any more.
    """
    if not _start(call, problem).wait(seconds) and seconds > 0:
        logger.warning("%s: no end after %g s", problem, seconds)


def _start(call: Callable[[], object], problem: str) -> threading.Event:
    """Call it in a thread; the event says that it has returned."""
    calls = [
        call
    ]  # the thread takes it out, and so drops what it ends, which may take time as well
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
    """Let such calls end. For the end of the process, which must not unwind their threads."""
    deadline = time.monotonic() + LONGEST
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def _end_process(problem: str) -> None:
    print(
        f"{problem}: no end after {LONGEST:g} s. This process (pid {os.getpid()}) ends itself, so "
        f"that the other ranks need not wait for it.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_STATUS)
