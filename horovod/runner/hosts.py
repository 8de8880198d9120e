"""Which rank runs where: the host list of ``-H`` and the plan of slots made from it.

`launch` plans with it; `worker_env` turns each slot into a worker's variables.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

_HOST = re.compile(r"(?P<name>[\w.-]+)(?::(?P<slots>[0-9]+))?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host of the job; without a number of slots it takes as many ranks as are left."""

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class Slot:
    """The place of one rank."""

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse_hosts(text: str) -> list[Host]:
    """The hosts of ``name:slots,name:slots``; `ValueError` naming the item that is wrong."""
    hosts: list[Host] = []
    for item in text.split(","):
        match = _HOST.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"{item.strip()!r} is not of the form NAME or NAME:SLOTS")
        slots = None if match["slots"] is None else int(match["slots"])
        if slots == 0:
            raise ValueError(f"{item.strip()!r} offers no slots")
        if any(host.name == match["name"] for host in hosts):
            raise ValueError(f"host {match['name']!r} is named twice")
        hosts.append(Host(match["name"], slots))
    return hosts


def is_local(name: str) -> bool:
    """Whether a host of the list is this machine."""
    own = socket.gethostname()
    return name in {"localhost", "127.0.0.1", own, own.partition(".")[0]}


def plan_slots(hosts: Sequence[Host], num_proc: int) -> list[Slot]:
    """Places for ranks 0 to ``num_proc`` - 1: hosts in the order given, each filled in turn."""
    placed: list[tuple[str, int]] = []
    for host in hosts:
        free = num_proc - len(placed)
        count = free if host.slots is None else min(host.slots, free)
        placed += [(host.name, local_rank) for local_rank in range(count)]
    if len(placed) < num_proc:
        raise ValueError(
            f"the hosts offer {len(placed)} slots, but {num_proc} processes are to run; "
            f"give more slots (-H NAME:SLOTS) or a smaller -np"
        )
    slots = []
    for rank, (name, local_rank) in enumerate(placed):
        peers = [host for host, index in placed if index == local_rank]
        slots.append(
            Slot(
                hostname=name,
                rank=rank,
                size=num_proc,
                local_rank=local_rank,
                local_size=sum(host == name for host, _ in placed),
                cross_rank=peers.index(name),
                cross_size=len(peers),
            )
        )
    return slots
