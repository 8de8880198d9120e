"""Horovod for Keras 3, on TensorFlow, torch or JAX: ``import horovod.keras as hvd``.

The backend is the one that Keras uses (KERAS_BACKEND); no other framework is imported.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from horovod._keras import loading, old_compile, values
from horovod._keras import optimizer as optimizer_module
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.common.reduce_op import ReduceOp
from horovod.common.util import resolve_reduce_op
from horovod.engine.basics import HorovodBasics
from horovod.keras import callbacks

_backend = keras.config.backend()
Compression: Any
if _backend == "tensorflow":
    from horovod.tensorflow.compression import Compression
else:
    from horovod.torch.compression import Compression

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_basics = HorovodBasics()

init = _basics.init
shutdown = _basics.shutdown
is_initialized = _basics.is_initialized
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

Average = _basics.Average
Sum = _basics.Sum
Adasum = _basics.Adasum

if typing.TYPE_CHECKING:
    from horovod.keras import elastic as elastic

old_compile.explain_when_it_fails()


def __getattr__(name: str) -> Any:
    """``hvd.elastic``, imported when a script first asks for it."""
    if name == "elastic":
        return importlib.import_module("horovod.keras.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer like `optimizer` that uses the gradients of all ranks.

    They are reduced before they are clipped or checked for overflow. A model saved with it loads
    without Horovod. An optimizer that has been used is itself turned into the distributed one, and
    keeps its state; of others this is a copy.

    `op`: Average or Sum. `compression`: what travels in place of gradients. `sparse_as_dense`: turn
    sparse gradients into dense ones. `gradient_predivide_factor`: divide by this before the sum,
    and by the rest of the number of ranks after it. `groups`: how many parts to reduce the
    gradients in, or lists of the variables that belong together; `num_groups` is its older form.
    `backward_passes_per_step`: how many passes to add up before the ranks exchange gradients and
    take a step; `average_aggregated_gradients` divides the sum by their number. `process_set`: the
    ranks to reduce with. Gradients of variables given to its `register_local_var` stay on their
    rank; with `scale_local_gradients` they are divided by the number of ranks.
    """
    return optimizer_module.distribute(
        optimizer,
        num_groups=num_groups,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A `DistributedOptimizer` that leaves `local_layers`, one or several, to each rank."""
    distributed = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return optimizer_module.register_local_layers(distributed, local_layers)


def broadcast_global_variables(root_rank: int) -> Any:
    """In a v1 graph of TensorFlow: give every rank the root's values of all global variables."""
    return values.broadcast_global_variables(_backend, root_rank)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce a number, array or tensor over all ranks."""
    op = resolve_reduce_op(op, average)
    return values.allreduce(
        _backend, value, name, op, prescale_factor, postscale_factor, compression
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' values, concatenated along the first dimension."""
    return values.allgather(_backend, value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value."""
    return values.broadcast(_backend, value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """This rank's share of the reduced value."""
    return values.reducescatter(_backend, value, name, op)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
) -> Any:
    """The saved model in `filepath`; its optimizer, with its state, is a `DistributedOptimizer`.

    `custom_optimizers`: classes of optimizers that are not Keras's own. `custom_objects`: other
    things by the names that the file has for them.
    """
    return loading.load_model(keras, filepath, custom_optimizers, custom_objects, compression)
