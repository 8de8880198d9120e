"""`DistributedOptimizer` for any Keras: what the front ends export, and `load_model`.

A Keras optimizer becomes one of a class derived from its own, which reduces gradients before they
are clipped, accumulated or checked for overflow. How it does that is in `keras3_optimizer` and
`tf_keras_optimizer`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from horovod._keras.flavour import backend_of, is_optimizer, is_tf_keras
from horovod._keras.rebuild import derived_class, rebuilt, taken_over
from horovod._keras.reduction import Distribution
from horovod.common.compression import NoneCompressor
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import ReduceOp


def distribute(optimizer: Any, *, num_groups: int = 0, **arguments: Any) -> Any:
    """An optimizer like `optimizer` that uses the gradients of all ranks."""
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        if arguments.get("groups") is None:
            arguments["groups"] = num_groups
    distribution = Distribution(**arguments)
    _check(optimizer)
    return _distributed(optimizer, distribution, rebuilt)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A `DistributedOptimizer` that leaves `local_layers`, one or several, to each rank.

    `optimizer`, `name`, `device_dense`, `device_sparse`, `compression`, `sparse_as_dense`,
    `gradient_predivide_factor`, `op`, `backward_passes_per_step`, `average_aggregated_gradients`,
    `groups`, `process_set` and `scale_local_gradients` are those of `DistributedOptimizer`.
    """
    distributed = distribute(
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
    return register_local_layers(distributed, local_layers)


def distribute_in_place(optimizer: Any, **arguments: Any) -> Any:
    """Turn an optimizer that nobody else uses, with its state, into a distributed one."""
    distribution = Distribution(**arguments)
    _check(optimizer)
    return _distributed(optimizer, distribution, taken_over)


def register_local_layers(optimizer: Any, layers: Any) -> Any:
    """Leave the gradients of some layers' weights to each rank; returns the optimizer."""
    if layers is None:
        return optimizer
    for layer in layers if isinstance(layers, Iterable) else [layers]:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers must be Keras layers, not {type(layer).__name__}")
        for variable in layer.trainable_weights:
            optimizer.register_local_var(variable)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether this optimizer reduces gradients."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return hasattr(type(optimizer), "_hvd") or hasattr(type(inner), "_hvd")


def _check(optimizer: Any) -> None:
    if not is_optimizer(optimizer):
        raise ValueError(
            f"expected an optimizer of Keras, not {optimizer!r}; horovod.tensorflow and "
            "horovod.torch have a DistributedOptimizer for those of TensorFlow and torch"
        )
    if is_distributed(optimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already")


def _distributed(optimizer: Any, distribution: Distribution, make: Any) -> Any:
    distribution.start(backend_of(optimizer))
    if not is_tf_keras(optimizer):
        from horovod._keras.keras3_optimizer import Keras3Optimizer

        mixin: type = Keras3Optimizer
    else:
        from horovod._keras.tf_keras_optimizer import TfKerasOptimizer, with_inner

        if hasattr(optimizer, "inner_optimizer"):
            # This one asks its inner optimizer for the gradients of all, before it looks at them.
            inner = _distributed(optimizer.inner_optimizer, distribution, make)
            return with_inner(optimizer, inner)
        mixin = TfKerasOptimizer
    made = make(optimizer, derived_class(type(optimizer), mixin, {"_hvd": distribution}))
    if not is_tf_keras(made) and made.built:
        made._hvd_after_build()
    return made
