"""Trains with the gradients of all ranks: an optax transformation, and wrappers of ``jax.grad``.

`horovod.jax` exports them to users.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from horovod.common.local_steps import OuterSGD
from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Adasum, Average, ReduceOp, Sum
from horovod.jax.arrays import is_tracer
from horovod.jax.compression import Compression, Compressor
from horovod.jax.reductions import reduce_gradients
from horovod.torch.optimizers.local_steps import check_within


class AccumulationState(NamedTuple):
    """The state of a `DistributedOptimizer` with several backward passes per step."""

    passes: Any  # the number of passes since the last step
    sums: Any  # the sums of this rank's gradients
    inner: Any  # the state of the wrapped optimizer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    local_steps: int | None = None,
    outer: OuterSGD | None = None,
    warmup_steps: int = 0,
    average_state: bool = False,
    fragments: int = 1,
    delay: int = 0,
    alpha: float | None = None,
    within: ProcessSet | Literal["host"] | None = None,
) -> Any:
    """Wrap an optax optimizer so that it works on the gradients of all ranks.

    All gradients of a step are reduced as one operation. Transformations that clip or scale
    gradients belong into `optimizer`, which gets the reduced gradients. With one backward pass per
    step the state is the state of `optimizer`.

    Args:
        optimizer: Optax transformation, such as `optax.adam(1e-3)`.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        compression: Compressor for the gradients that travel, such as `Compression.fp16`. By
            default nothing is compressed.
        backward_passes_per_step: Number of updates whose gradients are added up on each rank before
            the ranks exchange them. The updates in between are zero. The default is 1.
        op: `Average` (the default), `Sum` or `Adasum`.
        gradient_predivide_factor: Divide the gradients by this number before the sum, and by size /
            number after it; the result is still the average. It needs `op=Average`. The default is
            1.
        average_aggregated_gradients: Whether to divide the sum of several backward passes by their
            number. The default is False.
        process_set: Ranks to reduce with. By default all ranks; a rank outside the set keeps its
            own gradients.
        local_steps: Number of steps that each rank takes with its own gradients before the ranks
            synchronise their parameters, for links that are slow. The returned optimizer then has
            two more methods: `end_step(params, opt_state)`, to call after each step, and
            `synchronize_parameters(params, opt_state)`, for the end. By default there are none.
        outer: Outer optimizer, such as `hvd.OuterSGD(lr=0.7, momentum=0.9)`, for which the distance
            that the ranks have moved is the gradient (DiLoCo). By default parameters are averaged
            (local SGD).
        warmup_steps: Number of ordinary steps before the first local one. The default is 0.
        average_state: Whether a synchronisation averages the state of `optimizer` too. By default
            every rank keeps its own.
        fragments: Number of parts into which the model is divided by layers. They are synchronised
            in turn, so that no step sends everything. The default is 1.
        delay: Number of steps between sending a fragment and updating its parameters: it travels
            beside training (streaming DiLoCo), except inside `jax.jit` on a GPU, where it travels
            when it is due. The default is 0.
        alpha: Share of a rank's own parameters that remains when a delayed fragment is updated. It
            needs `delay`, with which it is 0.5 by default.
        within: Process set of this rank's cluster, or `"host"` for the ranks of its host. In local
            steps the ranks of a cluster average their gradients. By default there are no clusters.

    Returns:
        An `optax.GradientTransformationExtraArgs`, to use in place of `optimizer`.

    Raises:
        ValueError: An argument is wrong.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optax.adam(1e-3 * hvd.size()))
        >>> opt_state = optimizer.init(params)
    """
    import optax

    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer must be an optax transformation, such as optax.sgd(0.1), not "
            f"{type(optimizer).__name__}"
        )
    options = OptimizerOptions.from_arguments(locals()).checked(Average, Sum, Adasum)
    passes = options.backward_passes_per_step
    inner = optax.with_extra_args_support(optimizer)
    if local_steps is not None:
        from horovod.jax.local_steps import make_optimizer  # needs optax

        if passes != 1:
            raise ValueError(
                "local_steps does not go with backward_passes_per_step: wrap optimizer in "
                "optax.MultiSteps to accumulate gradients"
            )
        check_within(within, process_set)
        return make_optimizer(inner, options)
    reduce = functools.partial(reduce_gradients, options=options)

    def step(gradients: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
        return inner.update(reduce(gradients), state, params, **extra)

    if passes == 1:
        return optax.GradientTransformationExtraArgs(
            inner.init,
            lambda gradients, state, params=None, **extra: step(gradients, state, params, extra),
        )

    def init(params: Any) -> AccumulationState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AccumulationState(jnp.zeros([], jnp.int32), zeros, inner.init(params))

    def update(
        gradients: Any, state: AccumulationState, params: Any = None, **extra: Any
    ) -> tuple[Any, AccumulationState]:
        count = state.passes + 1
        sums = jax.tree.map(jnp.add, state.sums, gradients)

        def last(_: None) -> tuple[Any, AccumulationState]:
            given = jax.tree.map(lambda total: total / options.pass_divisor, sums)
            updates, new = step(given, state.inner, params, extra)
            zeros = jax.tree.map(jnp.zeros_like, sums)  # multiplying by zero would keep NaN
            return updates, AccumulationState(jnp.zeros_like(count), zeros, new)

        def another(_: None) -> tuple[Any, AccumulationState]:
            return (
                jax.tree.map(jnp.zeros_like, gradients),
                AccumulationState(count, sums, state.inner),
            )

        if not any(is_tracer(leaf) for leaf in jax.tree.leaves((gradients, state))):
            return last(None) if int(count) == passes else another(None)
        return jax.lax.cond(count == passes, last, another, None)

    return optax.GradientTransformationExtraArgs(init, update)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> Callable[..., Any]:
    """Make `jax.value_and_grad` of a function, with the gradients of all ranks.

    It is for training without `DistributedOptimizer`; with both, gradients would be reduced twice.

    Args:
        fun: Function to differentiate. It returns a scalar, or a pair if `has_aux` is set.
        argnums: Positions of the arguments to differentiate with respect to. The default is 0, the
            first.
        has_aux: Whether `fun` returns a pair of the value and further data. The default is False.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        compression: Compressor for the gradients that travel, such as `Compression.fp16`. By
            default nothing is compressed.
        op: `Average` (the default), `Sum` or `Adasum`.
        gradient_predivide_factor: Divide the gradients by this number before the sum, and by size /
            number after it; the result is still the average. It needs `op=Average`. The default is
            1.
        process_set: Ranks to reduce with. By default all ranks; a rank outside the set keeps its
            own gradients.
        **options: Further arguments of `jax.value_and_grad`.

    Returns:
        A function that returns this rank's value and the gradients reduced over the ranks.

    Raises:
        ValueError: An argument is wrong.
    """
    local = jax.value_and_grad(fun, argnums, has_aux, **options)
    reduce = _reduction(locals())

    @functools.wraps(fun)
    def distributed(*args: Any, **kwargs: Any) -> Any:
        value, gradients = local(*args, **kwargs)
        return value, reduce(gradients)

    return distributed


def grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> Callable[..., Any]:
    """Make `jax.grad` of a function, with the gradients of all ranks.

    It is for training without `DistributedOptimizer`; with both, gradients would be reduced twice.

    Args:
        fun: Function to differentiate. It returns a scalar, or a pair if `has_aux` is set.
        argnums: Positions of the arguments to differentiate with respect to. The default is 0, the
            first.
        has_aux: Whether `fun` returns a pair of the value and further data. The default is False.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        compression: Compressor for the gradients that travel, such as `Compression.fp16`. By
            default nothing is compressed.
        op: `Average` (the default), `Sum` or `Adasum`.
        gradient_predivide_factor: Divide the gradients by this number before the sum, and by size /
            number after it; the result is still the average. It needs `op=Average`. The default is
            1.
        process_set: Ranks to reduce with. By default all ranks; a rank outside the set keeps its
            own gradients.
        **options: Further arguments of `jax.grad`.

    Returns:
        A function that returns the gradients reduced over the ranks and, with `has_aux`, this
        rank's further data.

    Raises:
        ValueError: An argument is wrong.
    """
    local = jax.grad(fun, argnums, has_aux, **options)
    reduce = _reduction(locals())

    @functools.wraps(fun)
    def distributed(*args: Any, **kwargs: Any) -> Any:
        result = local(*args, **kwargs)
        return (reduce(result[0]), result[1]) if has_aux else reduce(result)

    return distributed


def _reduction(arguments: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function that reduces a tree of gradients; `arguments` are a public function's."""
    options = OptimizerOptions.from_arguments(arguments).checked(Average, Sum, Adasum)
    return functools.partial(reduce_gradients, options=options)
