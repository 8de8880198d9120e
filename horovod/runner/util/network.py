"""Addresses and network interfaces of this host."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import psutil

from horovod.common.addresses import resolve
from horovod.runner.slots.hosts import is_local

Server = TypeVar("Server")


def get_local_host_addresses() -> set[str]:
    """The IPv4 addresses of this host."""
    return {address for addresses in _interfaces().values() for address in addresses}


def get_local_intfs(nic: Iterable[str] | None = None) -> set[str]:
    """The interfaces on which this host is 127.0.0.1, of those named or of all."""
    found = {name for name, addresses in _interfaces().items() if "127.0.0.1" in addresses}
    return found if not nic else found & set(nic)


def resolve_host_address(host: str) -> str:
    """The address of a host; itself where nobody knows one."""
    return next(iter(resolve(host)), host)


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """Those of the hosts that are other machines."""
    return [name for name in all_host_names if not is_local(name)]


def get_driver_ip(nics: Sequence[str]) -> str:
    """The address of this host on one of these interfaces; RuntimeError if it has none there."""
    for name in nics:
        for address in _interfaces().get(name, ()):
            return address
    raise RuntimeError(f"this host has no IPv4 address on {', '.join(nics) or 'no interface'}")


def find_port(server_factory: Callable[[tuple[str, int]], Server]) -> tuple[Server, int]:
    """Make a server on a free port with `server_factory((address, port))`; it and the port."""
    ports = list(range(1024, 65536))
    random.shuffle(ports)
    for port in ports:
        try:
            return server_factory(("", port)), port
        except OSError:
            continue
    raise OSError("there is no free port")


def _interfaces() -> dict[str, list[str]]:
    entries: dict[str, Any] = psutil.net_if_addrs()
    return {
        name: [entry.address for entry in found if entry.family == socket.AF_INET]
        for name, found in entries.items()
    }
