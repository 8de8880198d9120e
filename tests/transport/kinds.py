"""Every transport under test, built the way the engine would, but with chosen hosts."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from horovod.common.config import Config
from horovod.common.store import Store
from horovod.common.store.client import StoreClient
from horovod.transport import breakable, hierarchical, pairwise
from horovod.transport.base import Group, SingleTransport, Transport
from horovod.transport.device.host_copy import HostCopyTransport
from horovod.transport.hierarchical import HierarchicalTransport
from horovod.transport.host import peer_reduction
from horovod.transport.host.shared_memory import SharedMemoryTransport
from horovod.transport.network.tcp import TcpTransport
from horovod.transport.select import _subgroup
from tests.ranks import PATIENCE
from tests.transport import device_stand_in

WORLD = 10  # ranks of the world begin here, so that they differ from ranks of the group

Builder = Callable[[Group], Transport]


@dataclass(frozen=True)
class Kind:
    size: int
    build: Builder


def connect() -> Store:
    """The job's store, from the variables that every rank of a test has; it is never given up."""
    breakable._PATIENCE = PATIENCE
    return StoreClient(
        os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
        int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]),
        base64.b64decode(os.environ["_HOROVOD_SECRET_KEY"]),
        timeout=PATIENCE,
    )


def whole_group(rank: int, size: int, store: Store, config: Config | None = None) -> Group:
    config = config or Config(gloo_timeout_seconds=PATIENCE)
    return Group(rank, size, tuple(range(WORLD, WORLD + size)), store, config)


def build(kind: str, rank: int, store: Store) -> Transport:
    return KINDS[kind].build(whole_group(rank, KINDS[kind].size, store))


def small_pieces(build: Builder) -> Builder:
    """With limits so low that tensors of a test cross all of them."""

    def built(group: Group) -> Transport:
        pairwise.PIECE = 64 * 1024
        pairwise.ROUND_PIECE = 16 * 1024
        pairwise.MESSAGE = 100_000
        hierarchical.ONE_LANE = 1000
        hierarchical.PIECE = 50_000
        peer_reduction.PIECE = 64 * 1024
        return build(group)

    return built


def by_rounds(build: Builder) -> Builder:
    """As among many ranks, that do not all talk to each other."""

    def built(group: Group) -> Transport:
        pairwise.DIRECT = 1
        return small_pieces(build)(group)

    return built


def on_hosts(inside: Builder, hosts: Sequence[Sequence[int]], **knobs: bool) -> Builder:
    """A hierarchical transport over simulated hosts."""

    def built(group: Group) -> Transport:
        group = replace(group, config=replace(group.config, **knobs))
        host = next(ranks for ranks in hosts if group.rank in ranks)
        index = host.index(group.rank)
        neighbours = _subgroup(group, host, f"inside-{host[0]}")
        local = inside(neighbours) if len(host) > 1 else SingleTransport(neighbours)
        cross = None
        if index < min(len(ranks) for ranks in hosts):
            lane = [ranks[index] for ranks in hosts]
            cross = TcpTransport(_subgroup(group, lane, f"lane-{index}"))
        flat = TcpTransport(_subgroup(group, range(group.size), "flat"))
        return HierarchicalTransport(group, local, cross, hosts, flat)

    return built


def staged(group: Group) -> Transport:
    return HostCopyTransport(group, TcpTransport(_subgroup(group, range(group.size), "host")))


def device_over_tcp(group: Group) -> Transport:
    """The device transport, beside TCP for host memory."""
    host = TcpTransport(_subgroup(group, range(group.size), "host"))
    return device_stand_in.build(group, host)


def device_over_shared_memory(group: Group) -> Transport:
    host = SharedMemoryTransport(_subgroup(group, range(group.size), "host"))
    return device_stand_in.build(group, host)


def shared_memory_staged(group: Group) -> Transport:
    config = replace(group.config, shm_peer_memory=False)
    return SharedMemoryTransport(replace(group, config=config))


KINDS: dict[str, Kind] = {
    "single": Kind(1, SingleTransport),
    "shm": Kind(3, SharedMemoryTransport),
    "shm without peer memory": Kind(3, shared_memory_staged),
    "tcp": Kind(2, TcpTransport),
    "tcp in small pieces": Kind(3, small_pieces(TcpTransport)),
    "tcp by rounds, 3": Kind(3, by_rounds(TcpTransport)),
    "tcp by rounds, 5": Kind(5, by_rounds(TcpTransport)),
    "staged": Kind(2, staged),
    "device": Kind(2, device_over_tcp),
    "device, shm, 3": Kind(3, device_over_shared_memory),
    "hierarchical, tcp, 2+2": Kind(4, small_pieces(on_hosts(TcpTransport, [[0, 1], [2, 3]]))),
    "hierarchical, shm, 2+2 mixed": Kind(
        4, small_pieces(on_hosts(SharedMemoryTransport, [[0, 2], [3, 1]]))
    ),
    "hierarchical, shm, 2+1": Kind(3, on_hosts(SharedMemoryTransport, [[0, 1], [2]])),
    "hierarchical switched off": Kind(
        3,
        on_hosts(
            SharedMemoryTransport,
            [[0, 2], [1]],
            hierarchical_allreduce=False,
            hierarchical_allgather=False,
        ),
    ),
}
