"""Adasum for v1 optimizers: each rank takes its own steps, and Adasum combines the changes.

`DistributedOptimizer(..., op=Adasum)` makes such an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import global_process_set
from horovod.common.reduce_op import Adasum
from horovod.engine.collective import Reduction
from horovod.tensorflow.gradient_aggregation import as_op, new_variable, run_after
from horovod.tensorflow.gradients import wire_name
from horovod.tensorflow.ops.allreduce_ops import reduce_group
from horovod.tensorflow.ops.bridge import without_autograph
from horovod.tensorflow.ops.call import Call

_START = "delta_start"  # the slot with the value that a variable had before the ranks' own steps


class AdasumOptimizer(tf.compat.v1.train.Optimizer):
    """A v1 optimizer that combines the ranks' steps after every `backward_passes_per_step`."""

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
