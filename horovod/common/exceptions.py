"""Errors that users see.

    RuntimeError
    ├── HorovodInternalError         a collective failed; elastic training recovers from it
    │   └── PeerLostError            ... because a rank died, was cut off or went away
    ├── HostsUpdatedInterrupt        the set of hosts changed; elastic training re-forms
    └── UndefinedOperationError      an operation is not defined for such a tensor (also ValueError)
    ImportError
    └── HorovodVersionMismatchError  a framework differs from the one we were installed for

A wrong argument is a ``ValueError``, raised on the rank that passed it before anything is sent. It
is a RuntimeError as well where upstream has its engine find out, so that scripts catch either.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class HorovodInternalError(RuntimeError):
    """A collective operation or the engine failed."""


class PeerLostError(HorovodInternalError):
    """Other ranks are gone; ``ranks`` are their ranks in the group that noticed."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def fresh_copy(error: E) -> E:
    """An exception equal to `error`, to be raised again: the original keeps its traceback."""
    return copy.copy(error).with_traceback(None)  # with its attributes


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed; with ``skip_sync`` the state needs no synchronisation."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


class UndefinedOperationError(ValueError, RuntimeError):
    """A collective is not defined for a tensor of this type or number of dimensions."""


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
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
