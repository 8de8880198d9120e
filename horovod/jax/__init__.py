"""Horovod for JAX: ``import horovod.jax as hvd``."""

from __future__ import annotations

import importlib
import typing

from horovod.jax import versions as _versions  # first: says if JAX is missing or too old

_versions.check()

from horovod.common.exceptions import HorovodInternalError  # noqa: E402
from horovod.common.process_sets import (  # noqa: E402
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.jax.basics import (  # noqa: E402
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
)
from horovod.jax.compression import Compression  # noqa: E402
from horovod.jax.functions import (  # noqa: E402
    allgather_object,
    broadcast_object,
    broadcast_parameters,
)
from horovod.jax.movements import (  # noqa: E402
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_async,
    grouped_allgather,
    grouped_allgather_async,
)
from horovod.jax.optimizer import DistributedOptimizer, grad, value_and_grad  # noqa: E402
from horovod.jax.reductions import (  # noqa: E402
    allreduce,
    allreduce_async,
    average_metrics,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horovod.torch.handles import poll, synchronize  # noqa: E402

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grad",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
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
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
    "value_and_grad",
]

if typing.TYPE_CHECKING:
    from horovod.jax import elastic as elastic
    from horovod.jax import linen as linen
    from horovod.jax import nnx as nnx


def __getattr__(name: str) -> typing.Any:
    """``hvd.elastic``, and ``hvd.linen`` and ``hvd.nnx`` which need flax, when first asked for."""
    if name in ("elastic", "linen", "nnx"):
        return importlib.import_module(f"horovod.jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
