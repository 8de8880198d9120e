"""Which of this host's addresses the other ranks should use.

Called by `rendezvous` on rank 0, and by the launcher for the store that it serves.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9
_ANYBODY = "192.0.2.1"
"""A port, and an address reserved for documentation, to ask the routing table with: nothing is
sent there."""


def interface_address(names: str) -> str:
    """Return the address of the first interface in a comma-separated list (HOROVOD_GLOO_IFACE).

    Raises:
        ValueError: This host has no such interface, or it has no address.
    """
    import psutil

    name = names.split(",")[0].strip()
    interfaces = psutil.net_if_addrs()
    entries = interfaces.get(name, ())
    addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
    addresses += [
        entry.address
        for entry in entries
        if entry.family == socket.AF_INET6 and "%" not in entry.address
    ]
    if not addresses:
        known = ", ".join(sorted(interfaces))
        raise ValueError(
            f"HOROVOD_GLOO_IFACE={names}: this host has no interface {name!r} with an address; "
            f"it has {known}"
        )
    return str(addresses[0])


def resolve(name: str) -> list[str]:
    """Return the addresses of a host name, IPv4 first; empty if it has none."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    ordered = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in ordered))


def is_loopback(address: str) -> bool:
    """Return whether an address leads back to the host that uses it."""
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def is_local(address: str) -> bool:
    """Return whether this host can listen on an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def routable_address(iface: str | None, others: Iterable[str] = ()) -> str:
    """Return an address of this host that other hosts can reach; never a loopback address.

    Without `iface` it is the first of these: one of `others` that is this host itself; the address
    from which this host would send to one of them; the host name's address; the address from which
    it would send to any host.

    Args:
        iface: The network interface whose address to use.
        others: Names or addresses that have to do with the job.

    Raises:
        ValueError: There is no such address.
    """
    if iface:
        return interface_address(iface)
    known = [address for name in others if name for address in resolve(name)]
    known = [address for address in known if not is_loopback(address)]
    candidates = [address for address in known if is_local(address)]
    candidates += [source for address in known if (source := source_towards(address))]
    candidates += [address for address in resolve(socket.gethostname()) if is_local(address)]
    candidates += [source for source in (source_towards(_ANYBODY),) if source]
    for address in candidates:
        if not is_loopback(address):
            return address
    raise ValueError(
        f"cannot tell under which address other hosts reach {socket.gethostname()!r}: the name "
        f"resolves to no address of this host other than loopback, and there is no default route. "
        f"Set HOROVOD_GLOO_IFACE to the network interface that connects the hosts."
    )


def source_towards(address: str) -> str | None:
    """Return the address that packets to `address` would have as their source; send nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
        except OSError:
            return None
