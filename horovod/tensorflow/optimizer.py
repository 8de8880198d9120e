"""`DistributedOptimizer` for TensorFlow: chooses a wrapper, and has those of v1 optimizers.

`horovod.tensorflow.keras` wraps the optimizers of Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Adasum, Average, ReduceOp
from horovod.engine.collective import Reduction
from horovod.engine.runtime import runtime
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper,
    as_op,
    new_variable,
    run_after,
)
from horovod.tensorflow.gradients import GradientReduction, wire_name
from horovod.tensorflow.ops.bridge import without_autograph
from horovod.tensorflow.ops.call import Call
from horovod.tensorflow.ops.reductions import reduce_group

_START = "delta_start"  # the slot with the value that a variable had before the ranks' own steps


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer like `optimizer` that uses the gradients of all ranks.

    Args:
        optimizer: An optimizer of tf.compat.v1 or of Keras.
        name: Name of the new optimizer; by default made from the name of its class.
        use_locking: The argument of that name of v1 optimizers; False by default.
        device_dense: Accepted for compatibility.
        device_sparse: Accepted for compatibility.
        compression: A compressor for what is sent, such as `Compression.fp16`; none by default.
        sparse_as_dense: Whether to turn sparse gradients into dense ones; False by default.
        backward_passes_per_step: The number of passes whose gradients are added up before the ranks
            exchange them and take a step; 1 by default.
        op: `Average` (the default) or `Sum`. For v1 optimizers also `Adasum`, with which each rank
            takes its own step and Adasum combines the steps.
        gradient_predivide_factor: Divide gradients by this factor before the sum and by `size /
            factor` after it; the result is still the average. 1.0 by default.
        average_aggregated_gradients: Whether to average over a step's passes; False by default.
        num_groups: Older form of `groups`.
        groups: The number of groups in which gradients are reduced, or lists of variables that form
            a group; None (the default) for a single group.
        process_set: The ranks to reduce with, all by default; others keep their own gradients.
        scale_local_gradients: Whether to divide gradients that stay on their rank by the number of
            ranks; True by default.

    Returns:
        The distributed optimizer.

    Raises:
        ValueError: An argument is wrong.
        NotImplementedError: `op` is `Adasum` and there is a process set.
    """
    options = OptimizerOptions.from_arguments(locals())
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("op=Adasum does not go with average_aggregated_gradients=True")
    is_v1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    if not is_v1 and op == Adasum:
        raise ValueError("op=Adasum needs a tf.compat.v1 optimizer; Keras optimizers take others")
    if not is_v1:
        from horovod.tensorflow import keras  # it loads Keras, which v1 optimizers do without

        return keras.distribute(optimizer, options)
    shown_name = name or f"Distributed{type(optimizer).__name__}"
    reduction = GradientReduction(options.checked(), wire_name(shown_name))
    if op == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("op=Adasum works on the global process set only")
        return _AdasumOptimizer(optimizer, name, use_locking, compression, backward_passes_per_step)
    aggregation = None
    if backward_passes_per_step > 1:
        if tf.executing_eagerly():
            raise ValueError(
                "backward_passes_per_step > 1 needs a v1 graph with this optimizer: in eager "
                "execution use an optimizer of tf.keras"
            )
        aggregation = LocalGradientAggregationHelper(
            backward_passes_per_step,
            reduction,
            sparse_as_dense,
            average_aggregated_gradients,
            runtime.topology.rank,
            LocalGradientAggregationHelper._OPTIMIZER_TYPE_LEGACY,
            process_set,
            scale_local_gradients,
        )
    return _DistributedOptimizer(optimizer, name, use_locking, reduction, aggregation)


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """A v1 optimizer that reduces the gradients of another one, and lets that one apply them."""

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str | None,
        use_locking: bool,
        reduction: GradientReduction,
        aggregation: LocalGradientAggregationHelper | None,
    ) -> None:
        super().__init__(
            use_locking=use_locking, name=name or f"Distributed{type(optimizer).__name__}"
        )
        self._optimizer = optimizer
        self._reduction = reduction
        self._aggregation = aggregation

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of the variable `var`."""
        self._reduction.register_local(var)
        if self._aggregation is not None:
            self._aggregation.register_local_var(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the wrapped optimizer's gradients, reduced, with their variables."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        if self._aggregation is not None:
            reduced = self._aggregation.compute_gradients(gradients, variables)
        else:
            reduced = self._reduction(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        if self._aggregation is None:
            return self._optimizer.apply_gradients(*args, **kwargs)
        return self._aggregation.apply_gradients(
            lambda: self._optimizer.apply_gradients(*args, **kwargs),
            self._optimizer,
            *args,
            **kwargs,
        )

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)


class _AdasumOptimizer(tf.compat.v1.train.Optimizer):
    """A v1 optimizer whose ranks take their own steps; Adasum combines the changes.

    It does so after every `backward_passes_per_step`.
    """

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str | None,
        use_locking: bool,
        compression: Any,
        backward_passes_per_step: int,
    ) -> None:
        super().__init__(
            use_locking=use_locking, name=name or f"DistributedDelta{type(optimizer).__name__}"
        )
        self._wire_name = wire_name(f"{self._name}.delta")
        self._optimizer = optimizer
        self._compression = compression
        self._passes = backward_passes_per_step
        self._counter: Any = None  # counts steps since the last combination; None: combine each

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients of the wrapped optimizer, which are this rank's own."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    @without_autograph
    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Take a step, and combine the ranks' steps after `backward_passes_per_step` of them."""
        pairs = [(gradient, var) for gradient, var in grads_and_vars if gradient is not None]
        variables = [variable for _, variable in pairs]
        with tf.init_scope():
            starts = [self._zeros_slot(variable, _START, self._name) for variable in variables]
            if self._passes > 1 and self._counter is None:
                self._counter = new_variable(tf.TensorShape([]), tf.int32, f"{self._name}_counter")
        with run_after([gradient for gradient, _ in pairs]):
            remembered = self._at_step(0, lambda: self._remember(variables, starts))
        with run_after([remembered]):
            step = self._optimizer.apply_gradients(pairs, global_step=global_step)
        with run_after([step]):
            combined = self._at_step(self._passes - 1, lambda: self._combine(variables, starts))
        with run_after([combined]):
            return as_op([self._count()], name)

    def _at_step(self, number: int, action: Callable[[], Any]) -> Any:
        """Run the action only in step `number` after a combination."""
        if self._counter is None:
            return action()
        return tf.cond(tf.equal(self._counter.read_value(), number), action, tf.no_op)

    def _remember(self, variables: Sequence[Any], starts: Sequence[Any]) -> Any:
        """Copy the variables into their start slots."""
        return as_op(
            [
                start.assign(variable.read_value(), read_value=False)
                for variable, start in zip(variables, starts, strict=True)
            ]
        )

    def _combine(self, variables: Sequence[Any], starts: Sequence[Any]) -> Any:
        """Combine the ranks' changes since the start by Adasum, and apply the result."""
        start_values = [start.read_value() for start in starts]
        call = Call("HorovodGroupedAllreduce", self._wire_name, True, global_process_set, buckets=1)
        deltas = reduce_group(
            call,
            [
                variable.read_value() - start
                for variable, start in zip(variables, start_values, strict=True)
            ],
            Reduction(Adasum),
            self._compression,
        )
        return as_op(
            [
                variable.assign(begin + delta, read_value=False)
                for variable, begin, delta in zip(variables, start_values, deltas, strict=True)
            ]
        )

    def _count(self) -> Any:
        """Count a step, from 0 to `backward_passes_per_step` - 1."""
        if self._counter is None:
            return None
        following = (self._counter.read_value() + 1) % self._passes
        return self._counter.assign(following, read_value=False)

    def get_slot(self, var: Any, name: str) -> Any:
        return (
            super().get_slot(var, name) if name == _START else self._optimizer.get_slot(var, name)
        )

    def get_slot_names(self) -> list[str]:
        return sorted({*super().get_slot_names(), *self._optimizer.get_slot_names()})

    def variables(self) -> list[Any]:
        return [*super().variables(), *self._optimizer.variables()]
