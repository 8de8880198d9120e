"""What a collective costs, computed from constants that benchmarks/scaling_model.py measures.

Pure functions: nothing here measures, starts or prints anything. A rank's time for a collective has
four parts, a `Cost`:

- wait: latencies, in which nobody works;
- serial: the CPU's part that overlaps nothing, e.g. its work for each message;
- moving: the CPU's part for each byte, while the link is busy with others;
- wire: how long the link of the busiest host is full.

It takes wait + serial + max(moving, wire). Where ranks outnumber cores it cannot take less than
all their work, shared out among the cores: `crowding` is the number of ranks for each core.

The algorithms, as the network transport has them:

- `gathered`, for agreements and small tensors: one allgather on a circulant graph, in
  ceil(log2 p) rounds, after which every rank reduces everything by itself;
- `scattered`, for others: reduce-scatter and allgather, among few ranks in one round each,
  otherwise on the circulant graph; each rank sends 2 (p - 1) / p of the tensor, for any p;
- `hierarchical`: reduce-scatter in the shared memory of each host, `scattered` between the hosts
  by each local rank for its own lane, allgather in shared memory; in pieces, one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

SMALL = 256 * 1024  # bytes of all ranks together up to which a tensor is gathered
FEW = 8  # ranks up to which everybody exchanges slices with everybody
ONE_LANE = 64 * 1024  # bytes up to which one rank of each host carries a tensor
PIECE = 1024 * 1024  # bytes of a lane that are under way together
AGREEMENT = 64  # bytes that a rank contributes to an agreement


@dataclass(frozen=True)
class Machine:
    """One computer, as measured: seconds, and seconds per byte."""

    call: float  # of CPU for a tiny allreduce through shared memory: what Python takes
    message: float  # of CPU to send a message and receive one
    wake: float  # until a rank goes on that waits for a message
    send_byte: float  # of CPU
    receive_byte: float  # of CPU
    add_byte: float
    copy_byte: float
    shared_byte: float  # of CPU, of a large allreduce through shared memory between two ranks
    store_request: float  # to the job's store
    store_byte: float  # that the store serves
    cores: int


@dataclass(frozen=True)
class Link:
    """What connects each host to all others: both directions at once, no contention between."""

    latency: float  # seconds one way
    bandwidth: float  # bytes per second each way

    @classmethod
    def of(cls, gbit: float, latency_us: float) -> Link:
        return cls(latency_us * 1e-6, gbit * 1e9 / 8)

    @property
    def title(self) -> str:
        if math.isinf(self.bandwidth):
            return "loopback"
        return f"{self.bandwidth * 8 / 1e9:g} Gbit/s, {self.latency * 1e6:g} us"


LOOPBACK = Link(0.0, math.inf)  # its latency is the wake-up, its bandwidth the CPU's


@dataclass(frozen=True)
class Layout:
    """Where the ranks of a job are."""

    hosts: int
    per_host: int

    @property
    def size(self) -> int:
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Group:
    """Ranks that exchange messages, host after host in rank order."""

    size: int
    neighbours: int = 1  # ranks of this group on each host
    lanes: int = 1  # groups like this one that share the hosts' links

    @classmethod
    def flat(cls, layout: Layout) -> Group:
        return cls(layout.size, layout.per_host)


@dataclass(frozen=True)
class Cost:
    """Seconds of one rank, by what they are spent on; see the module."""

    wait: float = 0.0
    serial: float = 0.0
    moving: float = 0.0
    wire: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(getattr(self, f.name) * times for f in fields(self)))

    @property
    def work(self) -> float:
        """Seconds of CPU."""
        return self.serial + self.moving

    def seconds(self, crowding: float = 1.0) -> float:
        together = self.wait + self.serial + max(self.moving, self.wire)
        return max(together, crowding * self.work)


class Round(NamedTuple):
    """One round on a circulant graph: every rank sends `blocks` blocks `distance` ranks further."""

    distance: int
    blocks: int


def circulant(size: int) -> list[Round]:
    """The rounds of a reduce-scatter; an allgather has the same ones, the other way round."""
    rounds = []
    while size > 1:
        half = (size + 1) // 2
        rounds.append(Round(half, size - half))
        size = half
    return rounds


def crossing(distance: int, group: Group) -> int:
    """How many of a host's ranks have the rank at this distance on another host."""
    if group.neighbours >= group.size:
        return 0
    return min(distance, group.neighbours, group.size - distance)


def blocks_leaving(group: Group) -> int:
    """Blocks that a host sends in one phase of an allreduce on the circulant graph."""
    return sum(crossing(each.distance, group) * each.blocks for each in circulant(group.size))


def bytes_leaving(nbytes: float, group: Group) -> float:
    """Bytes that leave each host while this and its sister groups allreduce `nbytes` each."""
    if group.size <= FEW:
        blocks = group.neighbours * (group.size - group.neighbours)
    else:
        blocks = blocks_leaving(group)
    return 2 * group.lanes * blocks * nbytes / group.size


def gathered(nbytes: float, group: Group, link: Link, machine: Machine) -> Cost:
    """An allgather of `nbytes` of each rank, and the reduction of all by every rank."""
    if group.size == 1:
        return Cost()
    rounds = len(circulant(group.size))
    received = (group.size - 1) * nbytes
    per_byte = machine.send_byte + machine.receive_byte + machine.add_byte
    return Cost(
        wait=rounds * (machine.wake + _latency(group, link)),
        serial=rounds * machine.message,
        moving=received * per_byte,
        wire=group.lanes * blocks_leaving(group) * nbytes / link.bandwidth,
    )


def scattered(nbytes: float, group: Group, link: Link, machine: Machine) -> Cost:
    """Reduce-scatter and allgather."""
    if group.size == 1:
        return Cost()
    direct = group.size <= FEW
    waits = 1 if direct else len(circulant(group.size))  # in each phase
    messages = group.size - 1 if direct else waits
    sent = nbytes * (group.size - 1) / group.size
    return Cost(
        wait=2 * waits * (machine.wake + _latency(group, link)),
        serial=2 * messages * machine.message,
        moving=sent * (2 * (machine.send_byte + machine.receive_byte) + machine.add_byte),
        wire=bytes_leaving(nbytes, group) / link.bandwidth,
    )


def _latency(group: Group, link: Link) -> float:
    return link.latency if group.size > group.neighbours else 0.0


def between(nbytes: float, group: Group, link: Link, machine: Machine) -> Cost:
    """An allreduce over the network, by whichever way the size calls for."""
    way = gathered if group.size * nbytes <= SMALL else scattered
    return way(nbytes, group, link, machine)


def flat(nbytes: float, layout: Layout, link: Link, machine: Machine) -> Cost:
    """An allreduce in which no rank minds which others are on its host."""
    return between(nbytes, Group.flat(layout), link, machine)


def shared(nbytes: float, ranks: int, machine: Machine) -> Cost:
    """Half of an allreduce through shared memory: a reduce-scatter or an allgather.

    With two ranks each adds, or copies, half of the tensor; with many nearly all of it.
    """
    if ranks == 1:
        return Cost()
    part = 2 * (ranks - 1) / ranks
    return Cost(serial=machine.call / 2, moving=part * nbytes * machine.shared_byte / 2)


def hierarchical(nbytes: float, layout: Layout, link: Link, machine: Machine) -> Cost:
    """Shared memory inside hosts, lanes between them, in pieces."""
    if layout.per_host == 1:
        return flat(nbytes, layout, link, machine)
    lanes = 1 if nbytes <= ONE_LANE else layout.per_host
    pieces = max(1, math.ceil(nbytes / lanes / PIECE))
    inside = shared(nbytes / pieces, layout.per_host, machine) * 2
    group = Group(layout.hosts, lanes=lanes)
    outside = between(nbytes / lanes / pieces, group, link, machine)
    # The first piece comes to the link, and the last from it, while it has nothing else to do;
    # and only one piece waits for answers with nothing to do meanwhile.
    return Cost(
        wait=outside.wait,
        serial=pieces * (inside.serial + outside.serial) + inside.moving,
        moving=(pieces - 1) * inside.moving + pieces * outside.moving,
        wire=pieces * outside.wire,
    )


def agreement(layout: Layout, link: Link, machine: Machine, by_host: bool) -> Cost:
    """Whether all ranks have the same next request; `by_host`, one rank of a host asks the rest."""
    if not by_host or layout.per_host == 1:
        return gathered(AGREEMENT, Group.flat(layout), link, machine)
    inside = shared(0, layout.per_host, machine) * 2
    return inside + gathered(AGREEMENT, Group(layout.hosts), link, machine)


def allreduce(nbytes: float, layout: Layout, link: Link, machine: Machine, by_host: bool) -> Cost:
    """A whole call of hvd.allreduce. A small tensor travels with its agreement."""
    call = Cost(serial=machine.call)
    members = layout.hosts if by_host else layout.size
    if layout.size == 1:
        return call
    if members * nbytes <= SMALL and not (by_host and layout.per_host > 1):
        return call + gathered(nbytes + AGREEMENT, Group.flat(layout), link, machine)
    way = hierarchical if by_host else flat
    asked = agreement(layout, link, machine, by_host)
    return call + asked + way(nbytes, layout, link, machine)
