"""Errors that users see.

    RuntimeError
    ├── HorovodInternalError         a collective failed; elastic training recovers from it
    │   └── PeerLostError            ... because a rank died, was cut off or went away
    ├── HostsUpdatedInterrupt        the set of hosts changed; elastic training re-forms
    └── UndefinedOperationError      an operation is not defined for such a tensor (also ValueError)
    TimeoutError
    └── TimeoutException             a job's processes were not there, or not ready, in time
    ImportError
    └── HorovodVersionMismatchError  a framework differs from the one we were installed for

A wrong argument is a ``ValueError``, raised on the rank that passed it before anything is sent.
Where upstream's engine raises a RuntimeError for it, ours is both, so that scripts catch either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

E = TypeVar("E", bound="HorovodInternalError")


class HorovodInternalError(RuntimeError):
    """A collective operation or the engine failed.

    Args:
        *args: The message.
        ranks: The other ranks that caused the failure, as ranks of the group that noticed it.
            Empty if the reason is on this rank, or is the same on all ranks.
    """

    def __init__(self, *args: object, ranks: Iterable[int] = ()) -> None:
        super().__init__(*args)
        self.ranks = tuple(ranks)


class PeerLostError(HorovodInternalError):
    """Other ranks, `ranks`, are gone."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message, ranks=ranks)


def fresh_copy(error: E) -> E:
    """Return a copy of an error, to be raised once.

    An error that several callers raise would collect the tracebacks of all of them.
    """
    copy = type(error)(*error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def is_because_of_others(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from or after, names other ranks."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, HorovodInternalError) and error.ranks:
            return True
        error = error.__cause__ or error.__context__
    return False


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed.

    Args:
        skip_sync: Whether the state needs no synchronisation.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


class UndefinedOperationError(ValueError, RuntimeError):
    """A collective is not defined for a tensor of this type or number of dimensions."""


class TimeoutException(TimeoutError):
    """Something that was waited for did not happen in time."""


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the message of `HorovodVersionMismatchError`."""
    return (
        f"Horovod was installed for {name} {installed_version}, but {name} {version} is in use. "
        f"Reinstall Horovod or {name} so that the two agree."
    )


class HorovodVersionMismatchError(ImportError):
    """The framework in use is not the one Horovod was installed for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


_OURS = re.compile(r"\b(?:HorovodInternalError|PeerLostError): (.*)")


@contextmanager
def raise_our_errors() -> Iterator[None]:
    """Raise our error where a framework's error has it in its text.

    A step that a framework has compiled raises an error of the framework, with ours in the text.
    """
    try:
        yield
    except (HorovodInternalError, HostsUpdatedInterrupt):
        raise
    except Exception as error:
        match = _OURS.search(str(error))
        if match is None:
            raise
        raise HorovodInternalError(match[1]) from error
