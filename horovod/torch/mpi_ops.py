"""Upstream's home of the collectives: every operation under the name scripts import it by.

Each operation has a module in `horovod.torch.ops`; here are the basics of this
binding, `join` and `barrier`.
"""

from __future__ import annotations

from typing import Any

from torch.compiler import is_compiling

from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Adasum, Max, Min, Product
from horovod.engine import shared_api as _shared_api
from horovod.engine.arguments import set_id
from horovod.engine.runtime import runtime
from horovod.engine.shared_api import *
from horovod.engine.shared_api import _basics, is_homogeneous, is_initialized
from horovod.torch.compression import Compression
from horovod.torch.ops import handles, operators
from horovod.torch.ops.allgather import (
    HorovodAllgather,
    HorovodGroupedAllgather,
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from horovod.torch.ops.allreduce import (
    HorovodAllreduce,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
)
from horovod.torch.ops.alltoall import HorovodAlltoall, alltoall, alltoall_async
from horovod.torch.ops.broadcast import (
    HorovodBroadcast,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from horovod.torch.ops.grouped_allreduce import (
    HorovodGroupedAllreduce,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from horovod.torch.ops.handles import poll, synchronize
from horovod.torch.ops.reducescatter import (
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horovod.torch.ops.sparse import sparse_allreduce_async
from horovod.torch.ops.untraced import breaks_graph
from horovod.torch.optimizers import pending


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
    if not is_initialized():
        # Handles from before a shutdown could be waited for until now.
        handles.restart()
    _shared_api.init(comm, process_sets)


def shutdown() -> None:
    """Stop Horovod in this process; does nothing where it does not run.

    Parameters whose update is still to be made (overlap_forward) are updated before.
    """
    try:
        pending.finish()
    finally:
        _shared_api.shutdown()


@breaks_graph("call it outside of compiled code")
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
    if is_compiling():
        operators.barrier(process_set)
        return
    runtime.barrier(set_id(process_set), background=False).wait()


__all__ = [
    "Adasum",
    "Max",
    "Min",
    "Product",
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
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += _shared_api.__all__
