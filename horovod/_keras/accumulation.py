"""Adding up the gradients of several passes before the ranks exchange them, for Keras 3.

The sums are variables of the optimizer, so that JAX hands them from step to step. A pass that does
not end in a step of the optimizer counts as an iteration all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horovod._keras.flavour import backend_of, keras_of
from horovod._keras.reduction import Distribution


class Sums:
    """The sums of one optimizer's gradients since its last step, and how many passes they are of.

    The optimizer is built, and its part of `_hvd` says when to step.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._terms: Distribution = optimizer._hvd
        self._passes = optimizer.add_variable(shape=(), dtype="int", name="gradient_passes")
        self._totals = [
            optimizer.add_variable_from_reference(variable, name="gradient_sum")
            for variable in optimizer._trainable_variables
        ]

    @property
    def variables(self) -> list[Any]:
        return [self._passes, *self._totals]

    def add(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Any) -> None:
        """Add to the sums, and `apply` them if it is time for a step."""
        ops = keras_of(self._optimizer).ops
        done = self._terms.reduce.take_notes(gradients, variables)
        gradients = [self._dense(gradient) for gradient in gradients]
        totals = [self._totals[self._optimizer._get_variable_index(v)] for v in variables]
        self._passes.assign_add(1)
        for total, gradient in zip(totals, gradients, strict=True):
            if gradient is not None:
                total.assign_add(gradient)

        def step() -> None:
            given = [
                None if gradient is None else ops.divide(total, self._divisor())
                for total, gradient in zip(totals, gradients, strict=True)
            ]
            reduced = self._terms.reduce.reduce_rest(given, variables, done)
            for total in totals:
                total.assign(ops.zeros(total.shape, dtype=total.dtype))  # not even NaN stays
            apply(reduced, variables)

        def wait() -> None:
            for counter in counters(self._optimizer):
                counter.assign_add(1)

        is_last = ops.equal(ops.mod(self._passes, self._terms.backward_passes_per_step), 0)
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
        """The same for JAX, where values come in and go out, and nothing is assigned."""
        import jax
        import jax.numpy as jnp

        places = {id(v): place for place, v in enumerate(self._optimizer.variables)}
        state = list(optimizer_values)
        passes = places[id(self._passes)]
        state[passes] = state[passes] + 1
        totals = [places[id(total)] for total in self._totals]
        for total, gradient in zip(totals, gradients, strict=True):
            if gradient is not None:
                state[total] = state[total] + gradient

        def step() -> Any:
            given = [
                None if gradient is None else state[total] / self._divisor()
                for total, gradient in zip(totals, gradients, strict=True)
            ]
            reduced = self._terms.reduce(given, self._optimizer._trainable_variables)
            after = list(state)
            for total in totals:
                after[total] = jnp.zeros_like(state[total])
            new_values, new_state = apply(after, reduced, values)
            return list(new_values), list(new_state)

        def wait() -> Any:
            after = list(state)
            for counter in counters(self._optimizer):
                after[places[id(counter)]] += 1
            return list(values), after

        is_last = state[passes] % self._terms.backward_passes_per_step == 0
        return jax.lax.cond(is_last, step, wait)

    def _divisor(self) -> int:
        terms = self._terms
        return terms.backward_passes_per_step if terms.average_aggregated_gradients else 1

    def _dense(self, gradient: Any) -> Any:
        if backend_of(self._optimizer) != "tensorflow":
            return gradient
        return dense(gradient, self._terms)


def dense(gradient: Any, terms: Distribution) -> Any:
    """A gradient of TensorFlow as a tensor that can be added to."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if not terms.sparse_as_dense:
        raise ValueError(
            "backward_passes_per_step > 1 needs dense gradients: pass sparse_as_dense=True to "
            "DistributedOptimizer"
        )
    return tf.convert_to_tensor(gradient)


def counters(optimizer: Any) -> list[Any]:
    """The variables that count the steps of an optimizer and of those it holds."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:  # a loss scale optimizer leaves counting to the one inside
        return counters(inner)
    several = getattr(optimizer, "_inner_optimizers", [])
    return [optimizer._iterations, *(v for each in several for v in counters(each))]
