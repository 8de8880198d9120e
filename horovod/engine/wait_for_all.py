"""Waiting for several operations that were started together; bindings use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def wait_for_all(waits: Iterable[Callable[[], object]]) -> None:
    """Call every one of `waits`, and raise the first failure afterwards: none is left in flight."""
    failure = None
    for wait in waits:
        try:
            wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
