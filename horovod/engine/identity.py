"""Finds out which rank this process is, and which ranks are on which host.

Called by the runtime when it starts a job.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from horovod.common import environments
from horovod.common.config import Config
from horovod.common.exceptions import HorovodInternalError
from horovod.common.host import host_identity
from horovod.common.joining import rendezvous
from horovod.common.store import PrefixStore, Store
from horovod.common.topology import Topology
from horovod.transport import select


def meet(comm: Any, config: Config) -> tuple[Topology, Store, bool]:
    """Return our topology, the job's store, and whether the cross rank in the topology is final."""
    if comm is not None and not isinstance(comm, Iterable):
        if not hasattr(comm, "Get_rank"):
            raise ValueError(
                f"comm must be None, a list of ranks or an mpi4py communicator, not {comm!r}"
            )
        return *rendezvous.connect_by_communicator(comm, config), True
    environment = environments.detect()
    topology = environment.topology()
    store = rendezvous.connect(environment, config)
    ranks = list(comm or ())
    if not ranks:
        return topology, store, environment.cross() is not None
    if sorted(set(ranks)) != sorted(ranks) or not all(0 <= r < topology.size for r in ranks):
        raise ValueError(f"comm={ranks} is not a list of different ranks below {topology.size}")
    if topology.rank not in ranks:
        raise ValueError(f"rank {topology.rank} is not in comm={ranks}, so it must not call init()")
    return _chosen(topology, ranks, store), PrefixStore(store, f"comm{ranks}/"), True


def _chosen(topology: Topology, ranks: list[int], store: Store) -> Topology:
    """Return the topology among some of the launched ranks: local ranks follow from hosts."""
    prefix = PrefixStore(store, f"chosen{ranks}/")
    prefix.set(f"{topology.rank}", host_identity().encode())
    identities = [prefix.get(f"{rank}", 60).decode() for rank in ranks]
    hosts = select.by_host(identities)
    rank = ranks.index(topology.rank)
    (here,) = [host for host in hosts if rank in host]
    local = here.index(rank)
    peers = [host for host in hosts if len(host) > local]
    return Topology(rank, len(ranks), local, len(here), peers.index(here), len(peers))


def with_cross(topology: Topology, identities: Sequence[str]) -> Topology:
    """Return the topology with the cross rank that hosts give, if they give our local rank too."""
    hosts = select.by_host(identities)
    (here,) = [host for host in hosts if topology.rank in host]
    if (here.index(topology.rank), len(here)) != (topology.local_rank, topology.local_size):
        return topology
    peers = [host for host in hosts if len(host) > topology.local_rank]
    return dataclasses.replace(topology, cross_rank=peers.index(here), cross_size=len(peers))


def exchange_identities(topology: Topology, store: Store, config: Config) -> list[str]:
    """Return every rank's host identity. Rank 0 collects them, so each rank reads one value."""
    if topology.size == 1:
        return [host_identity()]
    timeout = config.start_timeout
    store.set(f"identity/{topology.rank}", host_identity().encode())
    if topology.rank == 0:
        identities = []
        for rank in range(topology.size):
            try:
                identities.append(store.get(f"identity/{rank}", timeout).decode())
            except TimeoutError:
                raise HorovodInternalError(
                    f"rank {rank} did not call init() within {timeout:g} s "
                    f"(HOROVOD_START_TIMEOUT): did it start, and did it fail before?",
                    ranks=[rank],
                ) from None
        store.set("identities", json.dumps(identities).encode())
        return identities
    try:
        result: list[str] = json.loads(store.get("identities", timeout))
    except TimeoutError:
        raise HorovodInternalError(
            f"rank 0 did not say within {timeout:g} s (HOROVOD_START_TIMEOUT) that all ranks have "
            f"called init(): it may wait for one that has not; look at its output first",
            ranks=[0],
        ) from None
    return result
