"""Pass calls, results and failures between ``horovod.run`` and its workers, in the job's store.

`run_function` puts the call in and takes results and failures out; `run_task` does the opposite.
The store answers only peers that have proved that they know the job's key: nothing is unpickled
before that. Large values go in pieces, because the size of a message to the store is limited.
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
    """The failure of the function on a rank."""

    rank: int | None  # None if the worker of an elastic job has none
    host: str
    pid: int
    problem: str  # for people, if there is no exception to raise again
    traceback: str
    error: bytes | None  # the pickled exception, if it can be unpickled
    because_of_others: bool = False  # it failed because another rank was lost


def result_name(rank: int) -> str:
    """Return the name of a rank's result in the store."""
    return f"function/result/{rank}"


def put(store: Store, name: str, content: bytes) -> None:
    """Store a value of any size; readers see it once all of its pieces are there."""
    starts = range(0, len(content), _PIECE)
    for number, start in enumerate(starts):
        store.set(f"{name}/{number}", content[start : start + _PIECE])
    store.set(name, b"%d" % len(starts))


def take(store: Store, name: str) -> bytes | None:
    """Return a value that was `put`, and remove it; None if there is none."""
    found = read(store, name)
    if found is not None:
        for key in (name, *store.keys(f"{name}/")):
            store.delete(key)
    return found


def read(store: Store, name: str) -> bytes | None:
    """Return a value that was `put`, and leave it in the store; None if there is none."""
    pieces = store.try_get(name)
    if pieces is None:
        return None
    return b"".join(store.get(f"{name}/{number}", 0.0) for number in range(int(pieces)))


def put_failure(store: Store, failure: Failure) -> None:
    """Add a failure; failures keep their order, because the first often causes the others."""
    number = store.add(_FAILURES, 1)
    put(store, f"{_FAILURES}/{number}", cloudpickle.dumps(failure))


def failures(store: Store) -> list[Failure]:
    """Return all failures that were reported, in order."""
    count = int(store.try_get(_FAILURES) or b"0")
    contents = [read(store, f"{_FAILURES}/{number}") for number in range(1, count + 1)]
    return [cloudpickle.loads(content) for content in contents if content is not None]


def pickled(error: BaseException) -> bytes | None:
    """Pickle an exception for another process; return None if it would not arrive unchanged."""
    if not isinstance(error, Exception):
        return None  # SystemExit and its like would end the caller
    try:
        content: bytes = cloudpickle.dumps(error)
        again: Any = cloudpickle.loads(content)
    except Exception:  # a class may do anything when it is pickled
        return None
    return content if type(again) is type(error) else None


def search_path() -> list[str]:
    """Return the folders of this process's modules, except those of its Python installation."""
    own = {*sysconfig.get_paths().values(), *site.getsitepackages()}
    own |= {*map(os.path.dirname, own), site.getusersitepackages()}
    folders = [os.path.abspath(folder or os.getcwd()) for folder in sys.path]
    return [folder for folder in dict.fromkeys(folders) if folder not in own]
