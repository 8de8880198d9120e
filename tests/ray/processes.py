"""Waiting for what a cluster does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

_SECONDS = 300.0


def await_true(condition: Callable[[], bool]) -> None:
    """Until it holds; an AssertionError if it never does."""
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def await_ends(pids: Iterable[int]) -> None:
    """Until none of these processes runs."""
    waiting = list(pids)
    await_true(lambda: not any(_runs(pid) for pid in waiting))


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
