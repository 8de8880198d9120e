"""Pass calls, results and failures between ``horovod.run`` and its workers, in the job's store.

`run_function` puts the call in and takes results and failures out; `run_task` does the opposite.
The store answers only peers that have proved that they know the job's key: nothing is unpickled
before that. Large values go in pieces, because the size of a message to the store is limited.

An exception of the function is raised as itself in the program that called `horovod.run`: with its
own class and attributes. It is a RuntimeError as well, and its text has the sentence by which
programs recognise a failed job, because Horovod 0.28.1 raised a RuntimeError with this sentence.
"""

from __future__ import annotations

import functools
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


FAILED = "Horovod detected that one or more processes exited with non-zero status"


class RemoteError(RuntimeError):
    """The function failed on a rank, or the rank did not live to return anything.

    If an exception could be brought here it is raised as itself, with this one as its cause.
    """

    def __init__(self, message: str, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


def with_known_sentence(message: str) -> str:
    """Return a message with the sentence that programs look for."""
    return f"{message}\n\n{FAILED}, thus causing the job to be terminated."


def as_runtime_error(error: Exception) -> Exception:
    """Return an exception like `error` that is a RuntimeError too; `error` if there can be none."""
    try:
        theirs: Any = type(error)
        kind: Any = _both(theirs)
        reduced: Any = error.__reduce__()
        _, arguments, *rest = reduced
        made: Exception = kind.__new__(kind, *arguments)
        # The built-in base class, whose `__init__` sets what Python keeps in an exception.
        built_in = next(each for each in theirs.__mro__ if each.__module__ == "builtins")
        built_in.__init__(made, *arguments)
        made.args = error.args
        for name, value in (rest[0] if rest and rest[0] else vars(error)).items():
            setattr(made, name, value)
        object.__setattr__(made, "_original", error)
        str(made)  # raises here, and not later, if its class cannot do that
    except Exception:  # a class may forbid any of this
        return error
    return made


@functools.cache
def _both(kind: Any) -> Any:
    bases = (kind,) if issubclass(kind, RuntimeError) else (kind, RuntimeError)
    names = {name: getattr(kind, name) for name in ("__qualname__", "__module__", "__doc__")}
    methods = {
        "__str__": lambda self: with_known_sentence(kind.__str__(self)),
        "__reduce__": lambda self: self._original.__reduce__(),  # others get the original
    }
    return type(kind.__name__, bases, {**names, **methods})
