"""The mixin that makes a Keras 3 optimizer reduce gradients.

Keras 3 gives gradients to an optimizer by `apply`, and on JAX by `stateless_apply`, which may or
may not call `apply`. The method that is called first reduces; a method that it calls does not.

A loss scale optimizer must see the gradients of all ranks, or the ranks would not skip the same
steps. So a loss scale optimizer that holds one of our optimizers reduces in its place. Keras makes
such a pair by itself under the policy mixed_float16.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from horovod._keras.flavour import backend_of, keras_of
from horovod._keras.rebuild import CallableList, derive_class, take_over
from horovod._keras.reduction import Distribution


class Keras3Optimizer:
    """Reduces gradients; mixed in before a Keras 3 optimizer class. `_hvd` has the options."""

    _hvd: Distribution
    _hvd_sums: _Sums | None = None  # only with backward_passes_per_step > 1
    _hvd_handed_over = False  # whether the loss scale optimizer that holds this one reduces
    _hvd_has_reduced = False  # set while the gradients, reduced by us, are being applied
    _hvd_hides_sums = False  # set while Keras reads or writes a file
    built: bool
    _trainable_variables: list[Any]

    # -- steps -----------------------------------------------------------------------------

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        apply = super().apply  # type: ignore[misc]
        if self._hvd_delegates() or not len(grads):
            return apply(grads, trainable_variables)
        if trainable_variables is not None:
            variables = trainable_variables = list(trainable_variables)
        elif self.built:
            variables = self._trainable_variables
        else:
            return apply(grads)  # raises Keras's own error
        with self._hvd_set("_hvd_has_reduced"):
            if self._hvd.options.backward_passes_per_step == 1:
                return apply(self._hvd.reduce(grads, variables), trainable_variables)
            if not self.built:
                self.build(variables)
                self.built = True
            assert self._hvd_sums is not None, "made when the optimizer is built"
            return self._hvd_sums.add(grads, variables, apply)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        apply = super().stateless_apply  # type: ignore[misc]
        if self._hvd_delegates() or not self.built:
            return apply(optimizer_variables, grads, trainable_variables)
        with self._hvd_set("_hvd_has_reduced"):
            if self._hvd_sums is not None:
                return self._hvd_sums.add_stateless(
                    optimizer_variables, grads, trainable_variables, apply
                )
            grads = self._hvd.reduce(grads, self._trainable_variables)
            return apply(optimizer_variables, grads, trainable_variables)

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of the variable `var`."""
        self._hvd.reduce.register_local(var)

    def _hvd_delegates(self) -> bool:
        """Return whether the steps are local, or another object or call reduces the gradients."""
        return self._hvd_handed_over or self._hvd_has_reduced or self._hvd.is_local

    @contextlib.contextmanager
    def _hvd_set(self, flag: str) -> Iterator[None]:
        """Set one of our flags inside this context, without Keras tracking the attribute."""
        object.__setattr__(self, flag, True)
        try:
            yield
        finally:
            object.__setattr__(self, flag, False)

    # -- variables and files -----------------------------------------------------------------

    def build(self, variables: Any) -> Any:
        result = super().build(variables)  # type: ignore[misc]
        self._hvd_after_build()
        return result

    def _hvd_after_build(self) -> None:
        if (
            self._hvd.options.backward_passes_per_step > 1
            and self._hvd_sums is None
            and not self._hvd_handed_over
        ):
            object.__setattr__(self, "_hvd_sums", _Sums(self))

    @property
    def variables(self) -> CallableList:
        variables = super().variables  # type: ignore[misc]
        if self._hvd_hides_sums and self._hvd_sums is not None:
            ours = {id(variable) for variable in self._hvd_sums.variables}
            variables = [variable for variable in variables if id(variable) not in ours]
        return CallableList(variables)

    def save_own_variables(self, store: Any) -> None:
        with self._hvd_set("_hvd_hides_sums"):  # so that the file loads without Horovod
            super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        with self._hvd_set("_hvd_hides_sums"):
            super().load_own_variables(store)  # type: ignore[misc]

    # -- loss scaling ------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "loss_scale_factor":
            # A loss scale optimizer sets this attribute on its inner optimizer. It is the only sign
            # by which the inner optimizer can notice.
            holder = sys._getframe(1).f_locals.get("self")
            if holder is not self and _is_loss_scaler(holder):
                self._hvd_hand_over(holder)

    def _hvd_hand_over(self, scaler: Any) -> None:
        """Let the loss scale optimizer reduce in our place."""
        if not hasattr(type(scaler), "_hvd"):
            take_over(scaler, derive_class(type(scaler), Keras3Optimizer, {"_hvd": self._hvd}))
        object.__setattr__(self, "_hvd_handed_over", True)


def _is_loss_scaler(thing: Any) -> bool:
    import keras

    return isinstance(thing, keras.optimizers.LossScaleOptimizer)


class _Sums:
    """The sums of one optimizer's gradients since its last step, and the number of passes in them.

    The optimizer must be built; its `_hvd` says after how many passes to step. The sums are its
    variables, so that JAX passes them from step to step. A pass without a step still counts as an
    iteration.
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
            for counter in _counters(self._optimizer):
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
            for counter in _counters(self._optimizer):
                after[indices[id(counter)]] += 1
            return list(values), after

        is_last = state[passes] % self._options.backward_passes_per_step == 0
        return jax.lax.cond(is_last, step, wait)

    def _to_dense(self, gradient: Any) -> Any:
        if backend_of(self._optimizer) != "tensorflow":
            return gradient
        from horovod.tensorflow.gradient_aggregation import to_dense

        return to_dense(gradient, self._options.sparse_as_dense)


def _counters(optimizer: Any) -> list[Any]:
    """Return the variables that count the steps of an optimizer and of its inner optimizers."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:  # a loss scale optimizer lets its inner optimizer count
        return _counters(inner)
    inner_optimizers = getattr(optimizer, "_inner_optimizers", [])
    return [optimizer._iterations, *(v for each in inner_optimizers for v in _counters(each))]
