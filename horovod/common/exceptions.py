"""Errors that users see.

    RuntimeError
    ├── HorovodInternalError         a collective failed; elastic training recovers from it
    │   └── PeerLostError            ... because a rank died, was cut off or went away
    └── HostsUpdatedInterrupt        the set of hosts changed; elastic training re-forms
    ImportError
    └── HorovodVersionMismatchError  a framework differs from the one we were installed for

A wrong argument is a plain ``ValueError``, raised on the rank that passed it before anything
is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class HorovodInternalError(RuntimeError):
    """A collective operation or the engine failed."""


class PeerLostError(HorovodInternalError):
    """Other ranks are gone; ``ranks`` are their ranks in the group that noticed."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed; with ``skip_sync`` the state needs no synchronisation."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


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


_OURS = re.compile(r"\b(?:HorovodInternalError|PeerLostError): (.*)")


def error_in_text(error: BaseException) -> HorovodInternalError | None:
    """The error of ours that a framework's error tells of.

    Out of a step that a framework has compiled comes an error of its own, with ours in the text.
    """
    found = _OURS.search(str(error))
    return None if found is None else HorovodInternalError(found[1])
