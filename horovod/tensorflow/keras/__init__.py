"""Horovod for tf.keras: ``import horovod.tensorflow.keras as hvd``.

tf.keras is Keras 3, or tf-keras (Keras 2) with TF_USE_LEGACY_KERAS=1; both work. In custom training
loops `horovod.tensorflow` has everything else.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from horovod._keras import loading, old_compile
from horovod._keras import optimizer as optimizer_module
from horovod._keras.optimizer import PartialDistributedOptimizer
from horovod._keras.values import Values
from horovod.common.reduce_op import ReduceOp
from horovod.engine import shared_api as _shared_api
from horovod.engine.shared_api import *  # noqa: F403
from horovod.engine.shared_api import Average, ProcessSet, global_process_set, init, shutdown
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.keras import callbacks

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "init",
    "load_model",
    "reducescatter",
    "shutdown",
]
__all__ += _shared_api.__all__

_values = Values("tensorflow")
allgather = _values.allgather
allreduce = _values.allreduce
broadcast = _values.broadcast
broadcast_global_variables = _values.broadcast_global_variables
reducescatter = _values.reducescatter

if typing.TYPE_CHECKING:
    from horovod.tensorflow.keras import elastic as elastic

if hasattr(tf.keras, "ops"):  # Keras 3
    old_compile.explain_when_it_fails()


def __getattr__(name: str) -> Any:
    """``hvd.elastic``, imported when a script first asks for it."""
    if name == "elastic":
        return importlib.import_module("horovod.tensorflow.keras.elastic")
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
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer like `optimizer` that uses the gradients of all ranks.

    They are reduced before they are clipped or checked for overflow. A model saved with it loads
    without Horovod. An optimizer that has been used is itself turned into the distributed one, and
    keeps its state; of others this is a copy.

    Args:
        optimizer: An optimizer of Keras.
        name: Of the new optimizer.
        device_dense: Accepted for compatibility.
        device_sparse: Accepted for compatibility.
        compression: What travels in place of gradients, such as `Compression.fp16`.
        sparse_as_dense: Turn sparse gradients into dense ones.
        gradient_predivide_factor: f divides by f before and by size / f after the sum.
        op: `Average` or `Sum`.
        num_groups: Older form of `groups`.
        groups: How many parts to reduce the gradients in, or lists of the variables that belong
            together.
        backward_passes_per_step: How many passes to add up before the ranks exchange gradients and
            take a step.
        average_aggregated_gradients: Divide that sum by the number of passes.
        process_set: The ranks to reduce with.
        scale_local_gradients: Gradients of variables given to its `register_local_var` stay on
            their rank; divide them by the number of ranks.

    Raises:
        ValueError: A wrong argument, or the optimizer is distributed already.

    Examples:
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())))
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


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """The saved model in `filepath`; its optimizer, with its state, is a `DistributedOptimizer`.

    Args:
        filepath: What `model.save` wrote.
        custom_optimizers: Classes of optimizers that are not Keras's own.
        custom_objects: Other things by the names that the file has for them.
        compression: That of the new `DistributedOptimizer`.
        legacy_opts: Accepted for compatibility: the file says which optimizer it has.
    """
    return loading.load_model(tf.keras, filepath, custom_optimizers, custom_objects, compression)
