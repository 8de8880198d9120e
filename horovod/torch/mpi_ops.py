"""Upstream's home of the collectives: every operation under the name scripts import it by.

The operations live in one module each (``allreduce_ops``, ...); here are the basics of this
binding, `join` and `barrier`.
"""

from __future__ import annotations

from typing import Any

from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.arguments import set_id
from horovod.engine.basics import HorovodBasics
from horovod.engine.runtime import runtime
from horovod.torch import handles, pending
from horovod.torch.allgather_ops import (
    HorovodAllgather,
    HorovodGroupedAllgather,
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from horovod.torch.allreduce_ops import (
    HorovodAllreduce,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
)
from horovod.torch.alltoall_ops import HorovodAlltoall, alltoall, alltoall_async
from horovod.torch.broadcast_ops import (
    HorovodBroadcast,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from horovod.torch.compression import Compression
from horovod.torch.grouped_allreduce_ops import (
    HorovodGroupedAllreduce,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from horovod.torch.handles import poll, synchronize
from horovod.torch.reducescatter_ops import (
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horovod.torch.sparse import sparse_allreduce_async

_basics = HorovodBasics()

is_initialized = _basics.is_initialized
stats = _basics.stats
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built
is_homogeneous = _basics.is_homogeneous

Average = _basics.Average
Sum = _basics.Sum
Adasum = _basics.Adasum
Min = _basics.Min
Max = _basics.Max
Product = _basics.Product


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start Horovod in this process; all processes of the job must call it.

    Calling it again only registers `process_sets`.

    Args:
        comm: None for all processes that were started, a list of ranks to choose some of them,
            or an mpi4py communicator.
        process_sets: A list of `ProcessSet` to register, the same on all ranks, or "dynamic" to
            allow `add_process_set` later.

    Raises:
        ValueError: The environment does not say which rank this is, or contradicts itself.
        HorovodInternalError: Another rank did not come within HOROVOD_START_TIMEOUT seconds.

    Examples:
        >>> hvd.init()
        >>> print(f"rank {hvd.rank()} of {hvd.size()}")
    """
    if not _basics.is_initialized():
        # Handles from before a shutdown could be waited for until now.
        handles.restart()
    _basics.init(comm, process_sets)


def shutdown() -> None:
    """Stop Horovod in this process; does nothing where it does not run.

    Parameters whose update is still to be made (overlap_forward) are updated before.
    """
    try:
        pending.finish()
    finally:
        _basics.shutdown()


def join(device: int = -1) -> int:
    """Say that this rank has no more data; wait until all ranks say so.

    Meanwhile the rank takes part in the others' allreduces with neutral elements.

    Args:
        device: Accepted for compatibility: neutral elements are made where the others' tensors are.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: The others take a step that needs this rank, as those of a sharded
            optimizer do, or a rank is lost.

    Examples:
        >>> last = hvd.join()
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    """
    return int(runtime.join(background=False).wait())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of `process_set` has called it."""
    runtime.barrier(set_id(process_set), background=False).wait()


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodInternalError",
    "HorovodReducescatter",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]
