"""Upstream's home of the collectives: every operation under the name scripts import it by.

The operations live in one module each (``allreduce_ops``, ...); here are the basics of this
binding and `join`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.engine.basics import HorovodBasics
from horovod.engine.runtime import runtime
from horovod.tensorflow import bridge
from horovod.tensorflow.allgather_ops import allgather, grouped_allgather
from horovod.tensorflow.allreduce_ops import allreduce, grouped_allreduce
from horovod.tensorflow.alltoall_ops import alltoall
from horovod.tensorflow.broadcast_ops import broadcast
from horovod.tensorflow.functions import broadcast_
from horovod.tensorflow.info_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from horovod.tensorflow.reducescatter_ops import grouped_reducescatter, reducescatter

_basics = HorovodBasics()

shutdown = _basics.shutdown
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
        comm: None for all processes that were started, a list of ranks to choose some of them, or
            an mpi4py communicator.
        process_sets: A list of `ProcessSet` to register, the same on all ranks, or "dynamic" to
            allow `add_process_set` later.

    Raises:
        ValueError: The environment does not say which rank this is, or contradicts itself.
        HorovodInternalError: Another rank did not come within HOROVOD_START_TIMEOUT seconds.
    """
    _basics.init(comm, process_sets)


@bridge.unconverted
def join() -> tf.Tensor:
    """Say that this rank has no more data; wait until all ranks say so.

    Meanwhile the rank takes part in the others' allreduces with neutral elements. The result is
    the rank that joined last.
    """

    def collective(_: list[torch.Tensor], __: str | None) -> Sequence[torch.Tensor]:
        last = bridge.wait(runtime.join(background=False))
        return [torch.tensor(last, dtype=torch.int32)]

    return bridge.run(collective, [], [tf.int32], [()], "HorovodJoin")[0]


__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stats",
    "stop_timeline",
]
