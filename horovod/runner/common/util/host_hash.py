"""A name for the host that a process runs on, equal for all that can share its memory and network.

Spark tasks tell it to the driver, which gives neighbouring ranks to those with the same name.
"""

from __future__ import annotations

import hashlib
import socket

from horovod.common.host import namespace


def host_hash(salt: str | None = None) -> str:
    """The short host name, and a digest of the full one, this process's namespaces and ``salt``."""
    hostname = socket.gethostname()
    digest = hashlib.sha256(hostname.encode())
    for kind in ("ipc", "mnt", "net", "pid", "user", "uts"):
        digest.update(f"{kind} {namespace(kind)}\n".encode())
    digest.update((salt or "").encode())
    return f"{hostname.partition('.')[0]}-{digest.hexdigest()[:32]}"
