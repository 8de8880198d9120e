"""Makes Keras optimizers distributed, for the front ends' `DistributedOptimizer` and `load_model`.

The distributed optimizer belongs to a class derived from that of the user's optimizer. It reduces
gradients before they are clipped, accumulated or checked for overflow; see `keras3_optimizer` and
`tf_keras_optimizer`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from horovod._keras.distribution import Distribution
from horovod._keras.flavour import backend_of, is_optimizer, is_tf_keras
from horovod._keras.rebuild import derive_class, rebuild, take_over
from horovod._keras.reduction import HostReduction
from horovod.common.compression import NoneCompressor
from horovod.common.local_steps import LocalSchedule
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import ReduceOp


def distribute(optimizer: Any, *, num_groups: int = 0, **arguments: Any) -> Any:
    """Return an optimizer like `optimizer` that uses the gradients of all ranks.

    `arguments` are the fields of `Distribution`.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        if arguments.get("groups") is None:
            arguments["groups"] = num_groups
    distribution = Distribution(**arguments)
    _check(optimizer)
    return _make_distributed(optimizer, distribution, rebuild)


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
    """Return a `DistributedOptimizer` that does not reduce the gradients of `local_layers`.

    Args:
        optimizer: An optimizer of Keras.
        name: Name of the reductions; "DistributedOptimizer" by default.
        device_dense: Accepted for compatibility.
        device_sparse: Accepted for compatibility.
        compression: How gradients are compressed on the way; not at all by default.
        sparse_as_dense: Whether to turn sparse gradients into dense ones; False by default.
        gradient_predivide_factor: Divide gradients by this factor before the sum and by
            `size / factor` after it; the result is still the average. 1.0 by default.
        op: `Average` (the default) or `Sum`.
        backward_passes_per_step: The number of passes whose gradients are added up before the ranks
            exchange them and take a step; 1 by default.
        average_aggregated_gradients: Whether to divide that sum by the number of passes; False by
            default.
        groups: The number of groups in which gradients are reduced, or lists of variables that form
            a group; None (the default) for a single group.
        process_set: The ranks to reduce with; all ranks by default.
        local_layers: One layer or several, whose gradients stay on their rank; none by default.
        scale_local_gradients: Whether to divide gradients that stay on their rank by the number of
            ranks; True by default.

    Returns:
        An optimizer of a class derived from that of `optimizer`.

    Raises:
        ValueError: An argument is wrong, or the optimizer is distributed already.
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
    """Turn this optimizer itself, with its state, into a distributed one, and return it."""
    distribution = Distribution(**arguments)
    _check(optimizer)
    return _make_distributed(optimizer, distribution, take_over)


def register_local_layers(optimizer: Any, layers: Any) -> Any:
    """Exclude the gradients of some layers' weights from the reduction; return the optimizer."""
    if layers is None:
        return optimizer
    for layer in layers if isinstance(layers, Iterable) else [layers]:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers must be Keras layers, not {type(layer).__name__}")
        for variable in layer.trainable_weights:
            optimizer.register_local_var(variable)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Return whether this optimizer, or the one inside it, reduces gradients."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return hasattr(type(optimizer), "_hvd") or hasattr(type(inner), "_hvd")


def _check(optimizer: Any) -> None:
    """Refuse objects that are not Keras optimizers, and optimizers that are distributed already."""
    if not is_optimizer(optimizer):
        raise ValueError(
            f"expected an optimizer of Keras, not {optimizer!r}; horovod.tensorflow and "
            "horovod.torch have a DistributedOptimizer for those of TensorFlow and torch"
        )
    if is_distributed(optimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already")


def _make_distributed(optimizer: Any, distribution: Distribution, make: Any) -> Any:
    """Derive a class from the optimizer's and return `make(optimizer, derived_class)`."""
    distribution.reduce = _make_reduction(distribution, backend_of(optimizer))
    if not is_tf_keras(optimizer):
        from horovod._keras.keras3_optimizer import Keras3Optimizer

        mixin: type = Keras3Optimizer
    else:
        from horovod._keras.tf_keras_optimizer import TfKerasOptimizer, replace_inner

        if hasattr(optimizer, "inner_optimizer"):
            # A loss scale optimizer of tf-keras lets its inner optimizer reduce the gradients
            # before it checks them for overflow.
            inner = _make_distributed(optimizer.inner_optimizer, distribution, make)
            return replace_inner(optimizer, inner)
        mixin = TfKerasOptimizer
    distributed = make(optimizer, derive_class(type(optimizer), mixin, {"_hvd": distribution}))
    if not is_tf_keras(distributed) and distributed.built:
        distributed._hvd_after_build()
    return distributed


def reduction_among(process_set: ProcessSet, distribution: Distribution, optimizer: Any) -> Any:
    """Return what reduces gradients as the optimizer's distribution does, over other ranks."""
    among = dataclasses.replace(distribution, process_set=process_set, schedule=LocalSchedule())
    reduction = _make_reduction(among, backend_of(optimizer))
    reduction._local = distribution.reduce._local  # the variables that are passed to register_local
    return reduction


def _make_reduction(distribution: Distribution, backend: str) -> Any:
    """Return the object that reduces the gradients of this backend."""
    if backend == "tensorflow":
        from horovod.tensorflow.compression import Compression
        from horovod.tensorflow.reduced_gradients import OptimizerReduction

        return OptimizerReduction(
            op=distribution.op,
            compression=distribution.compression or Compression.none,
            sparse_as_dense=distribution.sparse_as_dense,
            gradient_predivide_factor=distribution.gradient_predivide_factor,
            groups=distribution.groups,
            process_set=distribution.process_set,
            scale_local_gradients=distribution.scale_local_gradients,
            name=distribution.name or "DistributedOptimizer",
            device_dense=distribution.device_dense,
            device_sparse=distribution.device_sparse,
        )
    if backend == "jax":
        from horovod._keras.jax_reduction import JaxReduction

        return JaxReduction(distribution)
    return HostReduction(distribution)
