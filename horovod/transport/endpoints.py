"""Where the ranks of a group run, and the address on which each of them therefore listens.

Every rank describes where it runs. From all descriptions each rank picks the address to listen on:
loopback when the whole group shares one network stack, else an address in a network that the
other hosts are in too, else the address from which the routes to them start. HOROVOD_GLOO_IFACE
overrides all this. Called by the TCP and MPI transports.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod.common.host import boot_id, namespace
from horovod.common.joining.addresses import LOOPBACK, is_loopback, source_towards


@dataclass(frozen=True)
class RankLocation:
    """Where a rank runs, described so that ranks on other hosts can compare."""

    host: str
    network: str  # equal where the loopback interface is shared
    pids: str  # equal where process ids mean the same processes
    pid: int
    networks: tuple[str, ...] = ()  # addresses with their prefix length, without loopback

    @classmethod
    def here(cls) -> RankLocation:
        """Return where this process runs, without `networks`: reading them takes a while."""
        host, boot = socket.gethostname(), boot_id()
        network, pids = (f"{host} {boot} {namespace(kind)}" for kind in ("net", "pid"))
        return cls(host, network, pids, os.getpid())

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankLocation:
        """Return the location that `dataclasses.asdict` and JSON have turned into `fields`."""
        return cls(**{**fields, "networks": tuple(fields["networks"])})


def choose_address(mine: RankLocation, everyone: Sequence[RankLocation]) -> str:
    """Return the address of this host on which the ranks at `everyone` reach it.

    Args:
        mine: The location of this rank.
        everyone: The locations of all ranks, with their networks.

    Raises:
        ValueError: This host has no address besides loopback.
    """
    elsewhere = [info for info in everyone if info.network != mine.network]
    if not elsewhere:
        return LOOPBACK
    own = [ipaddress.ip_interface(text) for text in mine.networks]
    for candidate in own:
        # An address that others have as well (a container bridge) leads back to themselves.
        if all(_is_neighbour(candidate, info) for info in elsewhere):
            return str(candidate.ip)
    for info in elsewhere:
        for text in info.networks:
            source = source_towards(str(ipaddress.ip_interface(text).ip))
            if source is not None and not is_loopback(source) and text not in mine.networks:
                return source
    if own:
        return str(own[0].ip)
    raise ValueError(
        f"host {mine.host} has no network address besides loopback, but other ranks run on "
        f"{', '.join(sorted({info.host for info in elsewhere}))}; set HOROVOD_GLOO_IFACE to the "
        f"network interface to use"
    )


def _is_neighbour(
    candidate: ipaddress.IPv4Interface | ipaddress.IPv6Interface, info: RankLocation
) -> bool:
    """Return whether another host is in the network of one of our addresses, and lacks that one."""
    theirs = [ipaddress.ip_interface(text) for text in info.networks]
    return any(t.network == candidate.network and t.ip != candidate.ip for t in theirs) and not any(
        t.ip == candidate.ip for t in theirs
    )
