"""A name for this host that another container or network on the same machine does not have."""

from __future__ import annotations

import hashlib
import os
import socket


def _namespaces() -> str:
    folder = "/proc/self/ns"
    try:
        return " ".join(os.readlink(f"{folder}/{name}") for name in sorted(os.listdir(folder)))
    except OSError:  # not Linux
        return ""


def host_hash(salt: str | None = None) -> str:
    """The short host name, and a digest of the full one, the name spaces and `salt`."""
    name = socket.gethostname()
    told = "-".join(filter(None, [name, _namespaces(), salt]))
    digest = hashlib.md5(told.encode(), usedforsecurity=False).hexdigest()
    return f"{name.partition('.')[0]}-{digest}"
