"""Ask Linux how long a thread had a core, and how long it wanted one and got none.

`recorder` writes both down for each step: a step that is long because its core was taken looks like
one that computes more, unless somebody asks the kernel.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

_PATH = "/proc/thread-self/schedstat"


class ThreadTimes(NamedTuple):
    """Totals since the thread began, in seconds."""

    ran: float  # on a core
    starved: float  # ready to run, and waiting for a core


def thread_times() -> ThreadTimes | None:
    """Return the times of the calling thread; None where the kernel does not tell."""
    try:
        with open(_PATH, "rb", buffering=0) as file:
            ran, starved = file.read(100).split()[:2]
    except (OSError, ValueError):
        return None
    if ran == b"0":  # a kernel that has the file and does not count
        return None
    # For a running thread the file's own number is as old as the last tick, up to 10 ms.
    return ThreadTimes(time.thread_time(), int(starved) / 1e9)


def allowed_cores() -> list[int] | None:
    """Return the numbers of the cores on which this process may run; None where unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return sorted(os.sched_getaffinity(0))
