"""Horovod for Keras 3, on TensorFlow, torch or JAX: ``import horovod.keras as hvd``.

The backend is the one that Keras uses (KERAS_BACKEND); no other framework is imported.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import keras

from horovod._keras import loading, old_compile
from horovod._keras import optimizer as optimizer_module
from horovod._keras.optimizer import PartialDistributedOptimizer
from horovod._keras.values import Values
from horovod.common.local_steps import LocalSchedule, OuterSGD
from horovod.common.reduce_op import Adasum, ReduceOp
from horovod.engine import shared_api as _shared_api
from horovod.engine.shared_api import *  # noqa: F403
from horovod.engine.shared_api import Average, ProcessSet, global_process_set, init, shutdown
from horovod.keras import callbacks

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

if typing.TYPE_CHECKING:
    from horovod.keras import elastic as elastic

old_compile.explain_when_it_fails()


def __getattr__(name: str) -> Any:
    """Import ``hvd.elastic`` when a script first asks for it."""
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
    local_steps: int | None = None,
    outer: OuterSGD | None = None,
    warmup_steps: int = 0,
    average_state: bool = False,
    fragments: int = 1,
    delay: int = 0,
    alpha: float | None = None,
    within: ProcessSet | Literal["host"] | None = None,
) -> Any:
    """Return an optimizer like `optimizer` that uses the gradients of all ranks.

    Gradients are reduced before they are clipped or checked for overflow. A model saved with the
    optimizer loads without Horovod. An optimizer that has been used is itself turned into the
    distributed one and keeps its state; of others a copy is returned.

    Args:
        optimizer: An optimizer of Keras.
        name: Name of the reductions; "DistributedOptimizer" by default.
        device_dense: Accepted for compatibility.
        device_sparse: Accepted for compatibility.
        compression: How gradients are compressed on the way, such as `Compression.fp16`; not at all
            by default.
        sparse_as_dense: Whether to turn sparse gradients into dense ones; False by default.
        gradient_predivide_factor: Divide gradients by this factor before the sum and by
            `size / factor` after it; the result is still the average. 1.0 by default.
        op: `Average` (the default) or `Sum`.
        num_groups: Older form of `groups`.
        groups: The number of groups in which gradients are reduced, or lists of variables that form
            a group; None (the default) for a single group.
        backward_passes_per_step: The number of passes whose gradients are added up before the ranks
            exchange them and take a step; 1 by default.
        average_aggregated_gradients: Whether to divide that sum by the number of passes; False by
            default.
        process_set: The ranks to reduce with; all ranks by default.
        scale_local_gradients: Whether to divide the gradients of variables that were passed to
            `register_local_var`, and so stay on their rank, by the number of ranks; True by
            default.
        local_steps: The number of steps that each rank takes with its own gradients before the
            ranks synchronise their weights, for links that are slow; none by default. It needs
            `hvd.callbacks.LocalStepsCallback()` in `fit`, without which steps stay ordinary ones.
        outer: The outer optimizer, such as `hvd.OuterSGD(lr=0.7, momentum=0.9)`, which takes a step
            with how far the ranks have moved (DiLoCo); None (the default) averages weights.
        warmup_steps: The number of ordinary steps before the first local one; 0 by default.
        average_state: Whether a synchronisation averages the optimizer's state too; False by
            default.
        fragments: The number of parts into which the model is divided by layers; they are
            synchronised in turn, so that no step sends everything. 1 by default.
        delay: The number of steps between sending a fragment and updating its weights, in which it
            travels beside training (streaming DiLoCo); 0 by default.
        alpha: What remains of a rank's own weights when a delayed fragment is updated; 0.5 by
            default with `delay`, without which it makes no sense.
        within: The process set of this rank's cluster, or `"host"` for the ranks of its host, whose
            gradients are averaged in local steps; None (the default) for no clusters.

    Returns:
        An optimizer of a class derived from that of `optimizer`.

    Raises:
        ValueError: An argument is wrong, or the optimizer is distributed already.

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
        schedule=LocalSchedule(
            local_steps, outer, warmup_steps, average_state, fragments, delay, alpha, within
        ),
    )


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
    return loading.load_model(keras, filepath, custom_optimizers, custom_objects, compression)
