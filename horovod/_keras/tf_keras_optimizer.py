"""A tf-keras (Keras 2) optimizer that reduces gradients: the part in front of the user's class.

What computes gradients returns those of all ranks, and notes that they are. What applies gradients
reduces those that nobody has reduced: both generations of tf-keras optimizers aggregate them in a
method of its own, which their loss scale optimizers call on the inner optimizer before they look
for overflow, so it is done there. For classes that apply gradients without it `apply_gradients`
calls it first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._keras.accumulation import dense
from horovod._keras.callable_list import CallableList
from horovod._keras.reduction import Distribution
from horovod.tensorflow.reduced_gradients import Done, note, noted, take_notes

Pairs = list[tuple[Any, Any]]


class TfKerasOptimizer:
    """Mixed in before an optimizer class of tf-keras, with its `Distribution` as `_hvd`."""

    _hvd: Distribution
    _hvd_sums: _Sums | None = None  # if the ranks do not exchange the gradients of every pass
    _hvd_has_reduced = False  # whether we have, and call what applies the gradients
    iterations: Any

    def aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """The gradients of all ranks."""
        pairs = list(grads_and_vars)
        if self._hvd_has_reduced or not pairs:
            return pairs
        gradients, variables = zip(*pairs, strict=True)
        done = take_notes(gradients, variables)
        return list(zip(self._hvd_reduced(gradients, variables, done), variables, strict=True))

    _aggregate_gradients = aggregate_gradients  # what tf_keras.optimizers.legacy calls it

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Pairs:
        """The gradients of all ranks with their variables, for `apply_gradients`."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> Pairs:
        """The same under the name that it has in tf_keras.optimizers.legacy."""
        base: Any = super()
        if hasattr(base, "_compute_gradients"):
            pairs = base._compute_gradients(loss, var_list, grad_loss, tape)
        elif grad_loss is None:
            pairs = base.compute_gradients(loss, var_list, tape)
        else:
            raise ValueError("grad_loss is for optimizers of tf_keras.optimizers.legacy only")
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        return list(zip(self._hvd_computed(gradients, variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """The gradients of all ranks, in a v1 graph; of tf_keras.optimizers.legacy only."""
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        return self._hvd_computed(gradients, tf.nest.flatten(params))

    def _hvd_computed(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Computed gradients, reduced: by us, or by a distributed tape that computed them."""
        done = [noted(gradient) for gradient in gradients]
        reduced = self._hvd_reduced(gradients, variables, done)
        note(reduced, variables, Done.ADDED_UP)
        return reduced

    def _hvd_reduced(
        self, gradients: Sequence[Any], variables: Sequence[Any], done: Sequence[Done]
    ) -> list[Any]:
        if self._hvd.backward_passes_per_step == 1:
            return list(self._hvd.reduce.reduce_rest(gradients, variables, done))
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
            take_notes([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        if name is not None:
            kwargs["name"] = name
        apply = functools.partial(super().apply_gradients, pairs, **kwargs)  # type: ignore[misc]
        object.__setattr__(self, "_hvd_has_reduced", True)
        try:
            if self._hvd_sums is None:
                return apply()
            self._hvd_prepare([variable for _, variable in pairs])
            with _after([gradient for gradient, _ in pairs]):
                is_complete = self._hvd_sums.is_complete()
            return tf.cond(
                is_complete,
                lambda: _value_after(apply(), self.iterations),
                lambda: _value_after(self.iterations.assign_add(1), self.iterations),
            )
        finally:
            object.__setattr__(self, "_hvd_has_reduced", False)

    def _hvd_prepare(self, variables: list[Any]) -> None:
        """Make the optimizer's variables, which cannot be made inside of a condition."""
        me: Any = self
        with tf.init_scope():
            if hasattr(me, "_create_all_weights"):
                me._create_all_weights(variables)
            else:
                me.build(variables)
        if hasattr(me, "_compute_current_learning_rate"):
            me._compute_current_learning_rate()

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to this rank."""
        self._hvd.register_local(var)

    @property
    def _agg_helper(self) -> _Sums | None:
        """What adds up the gradients of several passes, under the name that scripts look for."""
        return None if self._hvd.backward_passes_per_step == 1 else self._hvd_make_sums()

    def _hvd_make_sums(self) -> _Sums:
        if self._hvd_sums is None:
            object.__setattr__(self, "_hvd_sums", _Sums(self._hvd))
        assert self._hvd_sums is not None
        return self._hvd_sums

    def _hvd_unfinished(self, variables: list[Any]) -> list[Any]:
        """The variables that belong to a step whose passes are not complete, for elastic states.

        They are none of `variables`, because files do not have them either.
        """
        if self._hvd.backward_passes_per_step == 1:
            return []
        return self._hvd_make_sums().variables(variables)

    @property
    def variables(self) -> CallableList:
        found = super().variables  # type: ignore[misc]
        return CallableList(found() if callable(found) else found)


def _after(results: Sequence[Any]) -> Any:
    """A scope for what must come later in a v1 graph, where the order of calls means nothing."""
    return tf.control_dependencies([each for each in results if each is not None])


def _value_after(result: Any, variable: Any) -> Any:
    with _after([result] if tf.is_tensor(result) or isinstance(result, tf.Operation) else []):
        return variable.read_value()


class _Sums:
    """The sums of gradients since the last step, and how many passes they are of."""

    def __init__(self, terms: Distribution) -> None:
        self._terms = terms
        self._totals: dict[int, Any] = {}
        with tf.init_scope():
            self._passes = _variable(tf.zeros([], tf.int64))

    def add(self, gradients: Any, variables: Any, done: Sequence[Done]) -> list[Any]:
        """The reduced sums, if it is time for a step; else zeros, which never overflow."""
        gradients = [dense(gradient, self._terms) for gradient in gradients]
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        totals = [self._total(gradients[place], variables[place]) for place in places]
        added = [self._passes.assign_add(1, read_value=False)]
        for place, total in zip(places, totals, strict=True):
            added.append(total.assign_add(gradients[place], read_value=False))
        divisor = (
            self._terms.backward_passes_per_step if self._terms.average_aggregated_gradients else 1
        )

        def step() -> list[Any]:
            given = [total.read_value() / tf.cast(divisor, total.dtype) for total in totals]
            reduced = self._terms.reduce.reduce_rest(
                given, [variables[place] for place in places], [done[place] for place in places]
            )
            with _after(reduced):  # not even NaN stays
                zeros = [total.assign(tf.zeros_like(total), read_value=False) for total in totals]
            with _after(zeros):
                return [tf.identity(gradient) for gradient in reduced]

        def wait() -> list[Any]:
            return [tf.zeros_like(total) for total in totals]

        results: list[Any] = [None] * len(gradients)
        if places:
            with _after(added):
                reduced = tf.cond(self.is_complete(), step, wait)
            for place, gradient in zip(places, tf.nest.flatten(reduced), strict=True):
                results[place] = gradient
        return results

    def variables(self, trained: list[Any]) -> list[Any]:
        """All that is kept here for the gradients of these variables."""
        return [self._passes, *(self._total(variable, variable) for variable in trained)]

    @property
    def counter(self) -> Any:
        """How many passes the next step has so far."""
        return self._passes.read_value() % self._terms.backward_passes_per_step

    def is_complete(self) -> Any:
        """Whether a step is taken with what was added last."""
        passes = self._passes.read_value()
        return tf.equal(passes % self._terms.backward_passes_per_step, 0)

    def _total(self, gradient: Any, variable: Any) -> Any:
        key = id(getattr(variable, "handle", variable))
        if key not in self._totals:
            with tf.init_scope():
                zeros = tf.zeros(variable.shape, gradient.dtype)
                self._totals[key] = _variable(zeros), variable  # held: no other gets its identity
        return self._totals[key][0]


def _variable(value: Any) -> Any:
    variable = tf.Variable(value, trainable=False)
    if not tf.executing_eagerly():  # a v1 graph: have Keras initialise it
        from tf_keras.src import backend

        backend.track_variable(variable)
    return variable


def with_inner(scaler: Any, inner: Any) -> Any:
    """A loss scale optimizer of tf-keras like `scaler`, around another optimizer."""
    if inner is not scaler.inner_optimizer:
        arguments = {"dynamic": scaler.dynamic, "initial_scale": scaler.initial_scale}
        if scaler.dynamic:
            arguments["dynamic_growth_steps"] = scaler.dynamic_growth_steps
        scaler = type(scaler)(inner, **arguments)
    object.__setattr__(scaler, "register_local_var", inner.register_local_var)
    return scaler
