"""Adds up the gradients of several passes before the ranks exchange them, for Keras 3.

The sums are variables of the optimizer, so that JAX passes them from step to step. A pass without a
step of the optimizer still counts as an iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horovod._keras.distribution import Distribution
from horovod._keras.flavour import backend_of, keras_of


class Sums:
    """The sums of one optimizer's gradients since its last step, and the number of passes in them.

    The optimizer must be built; its `_hvd` says after how many passes to step.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._distribution: Distribution = optimizer._hvd
        self._options = self._distribution.options
        self._passes = optimizer.add_variable(shape=(), dtype="int", name="gradient_passes")
        self._totals = [
            optimizer.add_variable_from_reference(variable, name="gradient_sum")
            for variable in optimizer._trainable_variables
        ]

    @property
    def variables(self) -> list[Any]:
        return [self._passes, *self._totals]

    def add(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Any) -> None:
        """Add gradients to the sums; after the last pass of a step, reduce and `apply` the sums."""
        ops = keras_of(self._optimizer).ops
        marks = self._distribution.reduce.take_marks(gradients, variables)
        gradients = [self._to_dense(gradient) for gradient in gradients]
        totals = [self._totals[self._optimizer._get_variable_index(v)] for v in variables]
        self._passes.assign_add(1)
        for total, gradient in zip(totals, gradients, strict=True):
            if gradient is not None:
                total.assign_add(gradient)

        def step() -> None:
            given = [
                None if gradient is None else ops.divide(total, self._options.pass_divisor)
                for total, gradient in zip(totals, gradients, strict=True)
            ]
            reduced = self._distribution.reduce.reduce_unmarked(given, variables, marks)
            for total in totals:
                # Assign zeros: multiplying by zero would keep NaN.
                total.assign(ops.zeros(total.shape, dtype=total.dtype))
            apply(reduced, variables)

        def wait() -> None:
            for counter in counters(self._optimizer):
                counter.assign_add(1)

        is_last = ops.equal(ops.mod(self._passes, self._options.backward_passes_per_step), 0)
        if backend_of(self._optimizer) == "tensorflow":
            ops.cond(is_last, step, wait)
        elif bool(is_last):
            step()
        else:
            wait()

    def add_stateless(
        self,
        optimizer_values: Sequence[Any],
        gradients: Sequence[Any],
        values: Sequence[Any],
        apply: Callable[..., Any],
    ) -> Any:
        """Do the same on JAX, which passes values in and out and assigns nothing."""
        import jax
        import jax.numpy as jnp

        indices = {id(v): index for index, v in enumerate(self._optimizer.variables)}
        state = list(optimizer_values)
        passes = indices[id(self._passes)]
        state[passes] = state[passes] + 1
        totals = [indices[id(total)] for total in self._totals]
        for total, gradient in zip(totals, gradients, strict=True):
            if gradient is not None:
                state[total] = state[total] + gradient

        def step() -> Any:
            given = [
                None if gradient is None else state[total] / self._options.pass_divisor
                for total, gradient in zip(totals, gradients, strict=True)
            ]
            reduced = self._distribution.reduce(given, self._optimizer._trainable_variables)
            after = list(state)
            for total in totals:
                after[total] = jnp.zeros_like(state[total])
            new_values, new_state = apply(after, reduced, values)
            return list(new_values), list(new_state)

        def wait() -> Any:
            after = list(state)
            for counter in counters(self._optimizer):
                after[indices[id(counter)]] += 1
            return list(values), after

        is_last = state[passes] % self._options.backward_passes_per_step == 0
        return jax.lax.cond(is_last, step, wait)

    def _to_dense(self, gradient: Any) -> Any:
        if backend_of(self._optimizer) != "tensorflow":
            return gradient
        from horovod.tensorflow.gradient_aggregation import to_dense

        return to_dense(gradient, self._options.sparse_as_dense)


def counters(optimizer: Any) -> list[Any]:
    """Return the variables that count the steps of an optimizer and of its inner optimizers."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:  # a loss scale optimizer lets its inner optimizer count
        return counters(inner)
    inner_optimizers = getattr(optimizer, "_inner_optimizers", [])
    return [optimizer._iterations, *(v for each in inner_optimizers for v in counters(each))]
