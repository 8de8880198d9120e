"""What travels between ``horovod.run`` and its workers through the job's store.

`run_function` puts the call in and takes results and failures out; `run_task` does the opposite.
The store answers only those who proved that they know the job's key: nothing is unpickled before
that. Large values go in pieces, since a message to the store has an upper limit.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from typing import Any

import cloudpickle

from horovod.common.store import Store

CALL = "function/call"
SEARCH_PATH = "function/path"

_FAILURES = "function/failures"
_PIECE = 64 * 1024 * 1024


@dataclass(frozen=True)
class Failure:
    """How the function failed on a rank."""

    rank: int | None  # None where the worker of an elastic job has none
    host: str
    pid: int
    problem: str  # for people, where there is no exception to raise again
    traceback: str
    error: bytes | None  # the pickled exception, if it can be had back
    because_of_others: bool = False  # it failed because another rank was lost


def result_name(rank: int) -> str:
    return f"function/result/{rank}"


def put(store: Store, name: str, content: bytes) -> None:
    """Store a value of any size; it is there for readers once all of it is."""
    starts = range(0, len(content), _PIECE)
    for number, start in enumerate(starts):
        store.set(f"{name}/{number}", content[start : start + _PIECE])
    store.set(name, b"%d" % len(starts))


def take(store: Store, name: str) -> bytes | None:
    """A value that was `put`, which is removed; None if there is none."""
    found = read(store, name)
    if found is not None:
        for key in (name, *store.keys(f"{name}/")):
            store.delete(key)
    return found


def read(store: Store, name: str) -> bytes | None:
    """A value that was `put`, which stays."""
    pieces = store.try_get(name)
    if pieces is None:
        return None
    return b"".join(store.get(f"{name}/{number}", 0.0) for number in range(int(pieces)))


def put_failure(store: Store, failure: Failure) -> None:
    """Failures keep their order: the first is usually the reason of the others."""
    number = store.add(_FAILURES, 1)
    put(store, f"{_FAILURES}/{number}", cloudpickle.dumps(failure))


def failures(store: Store) -> list[Failure]:
    """All that were reported, the first one first."""
    count = int(store.try_get(_FAILURES) or b"0")
    contents = [read(store, f"{_FAILURES}/{number}") for number in range(1, count + 1)]
    return [cloudpickle.loads(content) for content in contents if content is not None]


def pickled(error: BaseException) -> bytes | None:
    """An exception for another process; None where it would not arrive as what it is."""
    if not isinstance(error, Exception):
        return None  # SystemExit and its like would end the caller
    try:
        content: bytes = cloudpickle.dumps(error)
        again: Any = cloudpickle.loads(content)
    except Exception:  # a class may do anything when it is pickled
        return None
    return content if type(again) is type(error) else None


def search_path() -> list[str]:
    """Where this process finds modules, without what belongs to its Python installation."""
    own = {*sysconfig.get_paths().values(), *site.getsitepackages()}
    own |= {*map(os.path.dirname, own), site.getusersitepackages()}
    places = [os.path.abspath(place or os.getcwd()) for place in sys.path]
    return [place for place in dict.fromkeys(places) if place not in own]
