"""The exceptions with which `horovod.run` reports that its function failed on a rank.

An exception that could be brought here is raised as itself: with its own class and attributes. It
is a RuntimeError as well, and its text has the sentence by which programs recognise a failed job,
because Horovod 0.28.1 raised a RuntimeError with this sentence.
"""

from __future__ import annotations

import functools
from typing import Any

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
        _built_in(theirs).__init__(made, *arguments)
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


def _built_in(kind: type[Exception]) -> Any:
    """Return the built-in base class, whose `__init__` sets what Python keeps in an exception."""
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")
