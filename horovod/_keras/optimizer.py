"""Makes Keras optimizers distributed: `DistributedOptimizer` of both front ends, and `load_model`.

The distributed optimizer belongs to a class derived from that of the user's optimizer. It reduces
gradients before they are clipped, accumulated or checked for overflow; see `keras3_optimizer` and
`tf_keras_optimizer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from horovod._keras.flavour import backend_of, is_optimizer, is_tf_keras
from horovod._keras.rebuild import derive_class, rebuild, take_over
from horovod._keras.reduction import Distribution, HostReduction
from horovod.common.compression import NoneCompressor
from horovod.common.local_steps import OuterSGD
from horovod.common.logging import get_logger
from horovod.common.optimizer_options import OptimizerOptions, weights_of
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import ReduceOp

logger = get_logger(__name__)


def documented_as(other: Any) -> Callable[[Any], Any]:
    """Return a decorator that gives a function the docstring of another, with the same arguments.

    `docs/site/docstrings.py` does the same for the reference on the site.
    """

    def document(function: Any) -> Any:
        function.__doc__ = other.__doc__
        return function

    return document


def distribute(optimizer: Any, options: OptimizerOptions) -> Any:
    """Return an optimizer like `optimizer` that uses the gradients of all ranks."""
    return _make_distributed(optimizer, _distribution(optimizer, options), rebuild)


def DistributedOptimizer(
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
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
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
        compression: A compressor for what is sent, such as `Compression.fp16`; none by default.
        sparse_as_dense: Whether to turn sparse gradients into dense ones; False by default.
        gradient_predivide_factor: Divide gradients by this factor before the sum and by
            `size / factor` after it; the result is still the average. 1.0 by default.
        op: `Average` (the default) or `Sum`.
        num_groups: Older form of `groups`.
        groups: The number of groups in which gradients are reduced, or lists of variables that form
            a group; None (the default) for a single group.
        backward_passes_per_step: The number of passes whose gradients are added up before the ranks
            exchange them and take a step; 1 by default.
        average_aggregated_gradients: Whether to average over a step's passes; False by default.
        process_set: The ranks to reduce with; all ranks by default.
        scale_local_gradients: Whether to divide the gradients of variables that were passed to
            `register_local_var`, and so stay on their rank, by the number of ranks; True by
            default.
        local_steps: The number of steps that each rank takes with its own gradients before the
            ranks synchronise their weights, for links that are slow; none by default. It needs
            `hvd.callbacks.LocalStepsCallback()` in `fit`; without it all steps are ordinary ones.
        outer: The outer optimizer, such as `hvd.OuterSGD(lr=0.7, momentum=0.9)`, for which the
            distance that the ranks have moved is the gradient (DiLoCo); None (the default) averages
            weights.
        warmup_steps: The number of ordinary steps before the first local one; 0 by default.
        average_state: Whether the optimizer's state is averaged, too; False by default.
        fragments: The number of parts into which the model is divided by layers; they are
            synchronised in turn, so that no step sends everything. 1 by default.
        delay: The number of steps between sending a fragment and updating its weights, in which it
            travels beside training (streaming DiLoCo); 0 by default.
        alpha: The share of a rank's own weights that remains when a delayed fragment is updated; it
            needs `delay`, with which it is 0.5 by default.
        within: The process set of this rank's cluster, or `"host"` for the ranks of its host, whose
            gradients are averaged in local steps; None (the default) for no clusters.

    Returns:
        An optimizer of a class derived from that of `optimizer`.

    Raises:
        ValueError: An argument is wrong, or the optimizer is distributed already.

    Examples:
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())))
    """
    return distribute(optimizer, OptimizerOptions.from_arguments(locals()))


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
        average_aggregated_gradients: Whether to average over a step's passes; False by default.
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
    distributed = distribute(optimizer, OptimizerOptions.from_arguments(locals()))
    for weight in weights_of(local_layers):
        distributed.register_local_var(weight)
    return distributed


def load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: dict[str, Any] | None,
    compression: Any,
) -> Any:
    """Load the model in `filepath`; its optimizer keeps its saved state and becomes distributed."""
    optimizers = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.models.load_model(
        filepath, custom_objects={**optimizers, **(custom_objects or {})}
    )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and distribution_of(optimizer) is None:
        if _has_no_variables(optimizer, model):
            logger.warning("the state of the optimizer in %s is lost to Keras 3", filepath)
            optimizer = type(optimizer).from_config(optimizer.get_config())
        distribution = _distribution(optimizer, OptimizerOptions(compression=compression))
        model.optimizer = _make_distributed(optimizer, distribution, take_over)
    return model


def _has_no_variables(optimizer: Any, model: Any) -> bool:
    """Return whether the optimizer was built for no variables, as Keras 3 does for .h5 files.

    Such an optimizer cannot take a step.
    """
    return (
        not is_tf_keras(optimizer)
        and optimizer.built
        and not optimizer._trainable_variables
        and bool(model.trainable_variables)
    )


def distribution_of(optimizer: Any) -> Distribution | None:
    """Return how an optimizer, or the one inside it, is distributed; None if it is not."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        distribution: Distribution | None = getattr(type(each), "_hvd", None)
        if distribution is not None:
            return distribution
    return None


def _distribution(optimizer: Any, options: OptimizerOptions) -> Distribution:
    """Check the options, and that this is an optimizer of Keras that is not distributed yet."""
    distribution = Distribution(options)
    if not is_optimizer(optimizer):
        raise ValueError(
            f"expected an optimizer of Keras, not {optimizer!r}; horovod.tensorflow and "
            "horovod.torch have a DistributedOptimizer for those of TensorFlow and torch"
        )
    if distribution_of(optimizer) is not None:
        raise ValueError("this optimizer is a DistributedOptimizer already")
    return distribution


def _make_distributed(optimizer: Any, distribution: Distribution, make: Any) -> Any:
    """Derive a class from the optimizer's and return `make(optimizer, derived_class)`."""
    distribution.reduce = _make_reduction(distribution.options, backend_of(optimizer))
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
    """Return an object that reduces gradients as the distribution does, over other ranks."""
    among = dataclasses.replace(distribution.options, process_set=process_set)
    reduction = _make_reduction(among, backend_of(optimizer))
    reduction._local = distribution.reduce._local  # the variables that are passed to register_local
    return reduction


def _make_reduction(options: OptimizerOptions, backend: str) -> Any:
    """Return the object that reduces the gradients of this backend."""
    name = options.name or "DistributedOptimizer"
    if backend == "tensorflow":
        from horovod.tensorflow.gradients import OptimizerReduction

        return OptimizerReduction(options, name)
    if backend == "jax":
        from horovod._keras.jax_reduction import JaxReduction

        return JaxReduction(options, name)
    return HostReduction(options, name)
