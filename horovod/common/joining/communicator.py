"""The rendezvous through an mpi4py communicator that the user passes to ``init(comm=...)``."""

from __future__ import annotations

from typing import Any

from horovod.common.config import Config
from horovod.common.joining.addresses import LOOPBACK, routable_address
from horovod.common.joining.launcher_store import StoreAddress
from horovod.common.store import Store, StoreServer
from horovod.common.topology import Topology
from horovod.common.wire import new_key

_servers: list[StoreServer] = []  # kept as long as the process lives: others may still read


def connect(comm: Any, config: Config) -> tuple[Topology, Store]:
    """Return our ranks in `comm`, and a store that its ranks share. Collective over `comm`."""
    from mpi4py import MPI

    rank, size = comm.Get_rank(), comm.Get_size()
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, local_size = host.Get_rank(), host.Get_size()
    host.Free()
    cross = comm.Split(local_rank)
    topology = Topology(rank, size, local_rank, local_size, cross.Get_rank(), cross.Get_size())
    cross.Free()
    store: StoreAddress | None = None
    if rank == 0:
        address = LOOPBACK if local_size == size else routable_address(config.gloo_iface)
        key = new_key()
        server = StoreServer(address, key)
        _servers.append(server)
        store = StoreAddress(server.address, server.port, key)
    store = comm.bcast(store, root=0)
    assert store is not None, "rank 0 has sent it"
    return topology, store.connect(config.start_timeout)
