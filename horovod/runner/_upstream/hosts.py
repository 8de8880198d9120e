"""Hosts and slots of ranks in the shapes that Horovod 0.28.1 has for them.

The grammar and the order of ranks are those of `horovod.runner.slots.hosts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod.runner.slots import hosts as new


@dataclass(frozen=True)
class HostInfo:
    """A host and how many ranks it takes."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """``NAME:SLOTS``."""
        (host,) = parse_hosts(host_string)
        return host


@dataclass
class SlotInfo:
    """The place of a rank."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Rank and size, local, cross: as text."""
        facts = (self.rank, self.size, self.local_rank, self.local_size)
        return ",".join(map(str, (*facts, self.cross_rank, self.cross_size)))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """The hosts of ``NAME:SLOTS,...``; `ValueError` where one has no number of slots."""
    found = []
    for host in new.parse_hosts(hosts_string):
        if host.slots is None:
            raise ValueError(f"{host.name!r} has no number of slots: write {host.name}:SLOTS")
        found.append(HostInfo(host.name, host.slots))
    return found


def parse_host_files(filename: str) -> str:
    """The hosts of a file as ``NAME:SLOTS,...``."""
    with open(filename, encoding="utf-8") as file:
        hosts = new.parse_hostfile(file)
    return ",".join(f"{host.name}:{host.slots or 1}" for host in hosts)


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """The names, and the number of slots of each."""
    found = parse_hosts(hosts)
    return [host.hostname for host in found], {host.hostname: host.slots for host in found}


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """A place for every slot, at most `max_num_proc`; `ValueError` below `min_num_proc`."""
    offered = sum(host.slots for host in hosts)
    if offered < min_num_proc:
        raise ValueError(f"the hosts offer {offered} slots, but {min_num_proc} ranks are to run")
    size = offered if max_num_proc is None else min(offered, max_num_proc)
    slots = new.plan_slots([new.Host(host.hostname, host.slots) for host in hosts], size)
    return [SlotInfo(**vars(slot)) for slot in slots]
