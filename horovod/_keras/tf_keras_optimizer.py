"""The mixin that makes a tf-keras (Keras 2) optimizer reduce gradients.

Methods that compute gradients return reduced ones, and mark them as reduced. Methods that apply
gradients reduce those that are not marked. Both generations of tf-keras optimizers have a method
that aggregates gradients, and their loss scale optimizers call it on the inner optimizer before
they look for overflow, so the reduction happens there. `apply_gradients` calls that method first,
for classes that would apply gradients without it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._keras.rebuild import CallableList
from horovod._keras.reduction import Distribution
from horovod.tensorflow.gradient_aggregation import run_after, to_dense
from horovod.tensorflow.gradients import Done, mark, mark_of, take_marks, variable_key

Pairs = list[tuple[Any, Any]]


class TfKerasOptimizer:
    """Reduces gradients; mixed in before a tf-keras optimizer class. `_hvd` has the options."""

    _hvd: Distribution
    _hvd_sums: _Sums | None = None  # only with backward_passes_per_step > 1
    _hvd_has_reduced = False  # set while the gradients, reduced by us, are being applied
    iterations: Any

    def aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """Return the reduced gradients with their variables."""
        pairs = list(grads_and_vars)
        if self._hvd_has_reduced or not pairs:
            return pairs
        gradients, variables = zip(*pairs, strict=True)
        done = take_marks(gradients, variables)
        return list(zip(self._hvd_reduce(gradients, variables, done), variables, strict=True))

    _aggregate_gradients = aggregate_gradients  # the name in tf_keras.optimizers.legacy

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Pairs:
        """Return the reduced gradients with their variables, for `apply_gradients`."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> Pairs:
        """Do the same under the name that tf_keras.optimizers.legacy uses."""
        base: Any = super()
        if hasattr(base, "_compute_gradients"):
            pairs = base._compute_gradients(loss, var_list, grad_loss, tape)
        elif grad_loss is None:
            pairs = base.compute_gradients(loss, var_list, tape)
        else:
            raise ValueError("grad_loss is for optimizers of tf_keras.optimizers.legacy only")
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        return list(zip(self._hvd_reduce_computed(gradients, variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Return the reduced gradients in a v1 graph; only tf_keras.optimizers.legacy has this."""
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        return self._hvd_reduce_computed(gradients, tf.nest.flatten(params))

    def _hvd_reduce_computed(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce and mark computed gradients, unless a distributed tape has reduced them."""
        done = [mark_of(gradient) for gradient in gradients]
        reduced = self._hvd_reduce(gradients, variables, done)
        mark(reduced, variables, Done.ADDED_UP)
        return reduced

    def _hvd_reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], done: Sequence[Done]
    ) -> list[Any]:
        if self._hvd.is_local:
            return list(gradients)
        if self._hvd.options.backward_passes_per_step == 1:
            return list(self._hvd.reduce.reduce_unmarked(gradients, variables, done))
        if Done.ADDED_UP in done:
            return list(gradients)
        return self._hvd_make_sums().add(gradients, variables, done)

    def apply_gradients(
        self,
        grads_and_vars: Any,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        pairs = list(grads_and_vars)
        if not skip_gradients_aggregation and experimental_aggregate_gradients:
            pairs = self.aggregate_gradients(pairs)
        else:
            take_marks([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        if name is not None:
            kwargs["name"] = name
        apply = functools.partial(super().apply_gradients, pairs, **kwargs)  # type: ignore[misc]
        object.__setattr__(self, "_hvd_has_reduced", True)
        try:
            if self._hvd_sums is None:
                return apply()
            self._hvd_prepare([variable for _, variable in pairs])
            with run_after([gradient for gradient, _ in pairs]):
                is_complete = self._hvd_sums.is_complete()
            return tf.cond(
                is_complete,
                lambda: _value_after(apply(), self.iterations),
                lambda: _value_after(self.iterations.assign_add(1), self.iterations),
            )
        finally:
            object.__setattr__(self, "_hvd_has_reduced", False)

    def _hvd_prepare(self, variables: list[Any]) -> None:
        """Make the optimizer's variables now, because tf.cond cannot make variables."""
        me: Any = self
        with tf.init_scope():
            if hasattr(me, "_create_all_weights"):
                me._create_all_weights(variables)
            else:
                me.build(variables)
        if hasattr(me, "_compute_current_learning_rate"):
            me._compute_current_learning_rate()

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of the variable `var`."""
        self._hvd.reduce.register_local(var)

    @property
    def _agg_helper(self) -> _Sums | None:
        """The sums of the gradients of several passes, under the name that scripts use."""
        return None if self._hvd.options.backward_passes_per_step == 1 else self._hvd_make_sums()

    def _hvd_make_sums(self) -> _Sums:
        if self._hvd_sums is None:
            object.__setattr__(self, "_hvd_sums", _Sums(self._hvd))
        assert self._hvd_sums is not None
        return self._hvd_sums

    def _hvd_pending_variables(self, variables: list[Any]) -> list[Any]:
        """Return the variables of a step whose passes are not complete, for elastic states.

        The optimizer's `variables` do not contain them, because files should not contain them.
        """
        if self._hvd.options.backward_passes_per_step == 1:
            return []
        return self._hvd_make_sums().variables(variables)

    @property
    def variables(self) -> CallableList:
        variables = super().variables  # type: ignore[misc]
        return CallableList(variables() if callable(variables) else variables)


def _value_after(result: Any, variable: Any) -> Any:
    """Return the value that the variable has after `result` was computed."""
    with run_after([result] if tf.is_tensor(result) or isinstance(result, tf.Operation) else []):
        return variable.read_value()


class _Sums:
    """The sums of gradients since the last step, and the number of passes in them."""

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._totals: dict[int, Any] = {}
        with tf.init_scope():
            self._passes = _variable(tf.zeros([], tf.int64))

    def add(self, gradients: Any, variables: Any, done: Sequence[Done]) -> list[Any]:
        """Add gradients, and return the reduced sums after the last pass of a step, else zeros.

        Zeros never overflow, so a loss scale optimizer accepts them.
        """
        sparse_as_dense = self._distribution.options.sparse_as_dense
        gradients = [to_dense(gradient, sparse_as_dense) for gradient in gradients]
        indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        totals = [self._total(gradients[index], variables[index]) for index in indices]
        added = [self._passes.assign_add(1, read_value=False)]
        for index, total in zip(indices, totals, strict=True):
            added.append(total.assign_add(gradients[index], read_value=False))

        def step() -> list[Any]:
            divisor = self._distribution.options.pass_divisor
            given = [total.read_value() / tf.cast(divisor, total.dtype) for total in totals]
            reduced = self._distribution.reduce.reduce_unmarked(
                given, [variables[index] for index in indices], [done[index] for index in indices]
            )
            with run_after(reduced):  # assign zeros: multiplying by zero would keep NaN
                zeros = [total.assign(tf.zeros_like(total), read_value=False) for total in totals]
            with run_after(zeros):
                return [tf.identity(gradient) for gradient in reduced]

        def wait() -> list[Any]:
            return [tf.zeros_like(total) for total in totals]

        results: list[Any] = [None] * len(gradients)
        if indices:
            with run_after(added):
                reduced = tf.cond(self.is_complete(), step, wait)
            for index, gradient in zip(indices, tf.nest.flatten(reduced), strict=True):
                results[index] = gradient
        return results

    def variables(self, trained: list[Any]) -> list[Any]:
        """Return all variables that are kept here for the gradients of the `trained` variables."""
        return [self._passes, *(self._total(variable, variable) for variable in trained)]

    @property
    def counter(self) -> Any:
        """The number of passes so far, since the last step."""
        return self._passes.read_value() % self._distribution.options.backward_passes_per_step

    def is_complete(self) -> Any:
        """Return whether the last pass that was added completes a step."""
        passes = self._passes.read_value()
        return tf.equal(passes % self._distribution.options.backward_passes_per_step, 0)

    def _total(self, gradient: Any, variable: Any) -> Any:
        """Return the variable with the sum of the gradients of `variable`, made if necessary."""
        key = variable_key(variable)
        if key not in self._totals:
            with tf.init_scope():
                zeros = tf.zeros(variable.shape, gradient.dtype)
                # Keep a reference, so that no other variable can get the same id.
                self._totals[key] = _variable(zeros), variable
        return self._totals[key][0]


def _variable(value: Any) -> Any:
    """Make a variable that is not trained, and that Keras initialises in a v1 graph."""
    variable = tf.Variable(value, trainable=False)
    if not tf.executing_eagerly():
        from tf_keras.src import backend

        backend.track_variable(variable)
    return variable


def replace_inner(scaler: Any, inner: Any) -> Any:
    """Return a loss scale optimizer of tf-keras like `scaler`, around another optimizer."""
    if inner is not scaler.inner_optimizer:
        arguments = {"dynamic": scaler.dynamic, "initial_scale": scaler.initial_scale}
        if scaler.dynamic:
            arguments["dynamic_growth_steps"] = scaler.dynamic_growth_steps
        scaler = type(scaler)(inner, **arguments)
    object.__setattr__(scaler, "register_local_var", inner.register_local_var)
    return scaler
