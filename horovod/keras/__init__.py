"""Horovod for Keras 3, on TensorFlow, torch or JAX: ``import horovod.keras as hvd``.

The backend is the one that Keras uses (KERAS_BACKEND); no other framework is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import keras

from horovod._keras import old_compile, optimizer
from horovod._keras.optimizer import DistributedOptimizer as KerasOptimizer
from horovod._keras.optimizer import PartialDistributedOptimizer, distribute, documented_as
from horovod._keras.values import Values
from horovod.common.local_steps import OuterSGD
from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.reduce_op import Adasum, ReduceOp
from horovod.engine import shared_api as _shared_api
from horovod.engine.shared_api import *  # noqa: F403
from horovod.engine.shared_api import Average, ProcessSet, global_process_set, init, shutdown
from horovod.keras import callbacks
from horovod.keras import elastic as elastic

_backend = keras.config.backend()
Compression: Any
if _backend == "tensorflow":
    from horovod.tensorflow.compression import Compression
else:
    from horovod.torch.compression import Compression

__all__ = [
    "Adasum",
    "Compression",
    "DistributedOptimizer",
    "OuterSGD",
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


_values = Values(_backend)
allgather = _values.allgather
allreduce = _values.allreduce
broadcast = _values.broadcast
broadcast_global_variables = _values.broadcast_global_variables
reducescatter = _values.reducescatter

old_compile.explain_when_it_fails()


@documented_as(KerasOptimizer)
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
    local_steps: int | None = None,
    outer: OuterSGD | None = None,
    warmup_steps: int = 0,
    average_state: bool = False,
    fragments: int = 1,
    delay: int = 0,
    alpha: float | None = None,
    within: ProcessSet | Literal["host"] | None = None,
) -> Any:
    return distribute(optimizer, OptimizerOptions.from_arguments(locals()))


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Load a saved model; its optimizer, with its state, becomes a `DistributedOptimizer`.

    Args:
        filepath: The file that `model.save` wrote.
        custom_optimizers: Optimizer classes that are not part of Keras; none by default.
        custom_objects: Other custom classes and functions, by their names in the file.
        compression: The compression of the `DistributedOptimizer`; none by default.

    Returns:
        The model.
    """
    return optimizer.load_model(keras, filepath, custom_optimizers, custom_objects, compression)
