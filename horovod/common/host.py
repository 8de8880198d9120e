"""Facts about the host that this process runs on: its name, its namespaces, its networks.

The engine groups ranks by `host_identity`, transports compare the other facts, Spark tasks tell
theirs to the driver. Which address others should use is in `addresses`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import os
import socket
import struct
from pathlib import Path


def host_name() -> str:
    """Return the launcher's name for this host, or else the system's."""
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


@functools.cache
def boot_id() -> str:
    """Return an id that changes each time the kernel starts, and is the same in its containers."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def namespace(kind: str) -> str:
    """Return this process's namespace of a kind ("net", "pid", ...); empty if unknown."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""


def host_identity() -> str:
    """Return a text that is equal for two processes exactly if they may try to share memory.

    The network namespace is part of it: abstract sockets, over which descriptors travel, are
    visible inside of one only.
    """
    return f"{host_name()}/{boot_id()}/{namespace('net')}"


def host_hash(salt: str | None = None) -> str:
    """Return a name for this host, equal for processes that can share its memory and network.

    It is the short host name and a digest of the full one, this process's namespaces and `salt`.
    Spark tasks tell it to the driver, which gives neighbouring ranks to those with the same name.
    """
    hostname = socket.gethostname()
    digest = hashlib.sha256(hostname.encode())
    for kind in ("ipc", "mnt", "net", "pid", "user", "uts"):
        digest.update(f"{kind} {namespace(kind)}\n".encode())
    digest.update((salt or "").encode())
    return f"{hostname.partition('.')[0]}-{digest.hexdigest()[:32]}"


def is_running(pid: int) -> bool:
    """Return whether a process of this host runs; a zombie does not."""
    import psutil  # here, because importing it would make every start slower

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def check_same_user(sock: socket.socket) -> int:
    """Return the pid of the process at the other end of a Unix socket.

    Raises:
        PermissionError: It belongs to another user.
    """
    size = struct.calcsize("iII")  # user ids may be larger than a signed number
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.getuid():
        raise PermissionError(f"process {pid} of user {uid} wanted to join")
    return int(pid)


def own_networks() -> list[str]:
    """Return this host's addresses with their prefix length, without loopback.

    IPv4 comes first, because clusters route it.
    """
    import psutil  # here, because it takes longer than connecting, where it is not needed

    networks: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        for entry in addresses:
            if entry.family not in networks or not entry.netmask:
                continue
            bits = int(ipaddress.ip_address(entry.netmask.partition("/")[0])).bit_count()
            with contextlib.suppress(ValueError):
                network = ipaddress.ip_interface(f"{entry.address}/{bits}")
                if not network.ip.is_loopback and not network.ip.is_link_local:
                    networks[entry.family].append(str(network))
    return networks[socket.AF_INET] + networks[socket.AF_INET6]
