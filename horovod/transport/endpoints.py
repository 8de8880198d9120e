"""Where the ranks of a group run, and so on which address each of them listens.

Every rank describes where it runs; from all descriptions each picks the address to listen on:
loopback when the whole group shares one network stack, else an address in a network that the
other hosts are in too, else the one that the routes to them start from. HOROVOD_GLOO_IFACE
overrides all this. Called by the TCP and MPI transports.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from horovod.common.addresses import LOOPBACK


@dataclass(frozen=True)
class RankLocation:
    """Where a rank runs, in words that another host can compare."""

    host: str
    network: str  # equal where the loopback interface is shared
    pids: str  # equal where process ids mean the same processes
    pid: int
    networks: tuple[str, ...] = ()  # addresses with their prefix length, without loopback

    @classmethod
    def here(cls) -> RankLocation:
        """Without networks, which it takes a while to find out, and may not matter."""
        host = socket.gethostname()
        return cls(
            host=host,
            network=f"{host} {_boot_id()} {_namespace('net')}",
            pids=f"{host} {_boot_id()} {_namespace('pid')}",
            pid=os.getpid(),
        )

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankLocation:
        return cls(**{**fields, "networks": tuple(fields["networks"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def choose_address(mine: RankLocation, everyone: Sequence[RankLocation]) -> str:
    """The address of this host on which the ranks at `everyone` reach it."""
    elsewhere = [info for info in everyone if info.network != mine.network]
    if not elsewhere:
        return LOOPBACK
    own = [ipaddress.ip_interface(text) for text in mine.networks]
    for candidate in own:
        # An address that others have as well (a container bridge) leads back to themselves.
        if all(_neighbours(candidate, info) for info in elsewhere):
            return str(candidate.ip)
    for info in elsewhere:
        for text in info.networks:
            source = _source_towards(str(ipaddress.ip_interface(text).ip))
            if source is not None and text not in mine.networks:
                return source
    if own:
        return str(own[0].ip)
    raise ValueError(
        f"host {mine.host} has no network address besides loopback, but other ranks run on "
        f"{', '.join(sorted({info.host for info in elsewhere}))}; set HOROVOD_GLOO_IFACE to the "
        f"network interface to use"
    )


def _neighbours(
    candidate: ipaddress.IPv4Interface | ipaddress.IPv6Interface, info: RankLocation
) -> bool:
    theirs = [ipaddress.ip_interface(text) for text in info.networks]
    return any(t.network == candidate.network and t.ip != candidate.ip for t in theirs) and not any(
        t.ip == candidate.ip for t in theirs
    )


def _source_towards(address: str) -> str | None:
    """The address that packets to `address` would carry as their source; sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        source = str(probe.getsockname()[0])
        return None if ipaddress.ip_address(source).is_loopback else source
    return None


def own_networks() -> list[str]:
    """This host's, IPv4 first: it is what clusters route."""
    import psutil  # takes longer than all the rest of connecting, where it is not needed

    found: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        for entry in addresses:
            if entry.family not in found or not entry.netmask:
                continue
            bits = int(ipaddress.ip_address(entry.netmask.partition("/")[0])).bit_count()
            with contextlib.suppress(ValueError):
                network = ipaddress.ip_interface(f"{entry.address}/{bits}")
                if not network.ip.is_loopback and not network.ip.is_link_local:
                    found[entry.family].append(str(network))
    return found[socket.AF_INET] + found[socket.AF_INET6]


def _boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def _namespace(kind: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""
