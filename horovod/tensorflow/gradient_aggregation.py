"""Gradient accumulation: adds up several passes on each rank before the ranks exchange gradients.

The v1 optimizers call these helpers instead of reducing and applying gradients themselves; scripts
written for upstream may use the helpers with any optimizer. The same code runs eagerly, in
tf.functions and in v1 graphs, which follow the order of the program only where they are told to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.optimizer_options import check_passes
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.gradients import as_list, scale_down, variable_key
from horovod.tensorflow.ops.bridge import without_autograph

Allreduce = Callable[[list[Any], list[Any]], Sequence[Any]]  # (gradients, variables) -> gradients


class GradientAggregation:
    """Counts passes, and reduces and applies the sum after every `backward_passes_per_step`.

    With `average_aggregated_gradients` the sum is divided by the number of passes. Gradients of
    variables that were passed to `register_local_var` are added up but not reduced;
    `scale_local_gradients` divides them by the number of ranks.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Allreduce,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        check_passes(backward_passes_per_step)
        self.backward_passes_per_step = backward_passes_per_step
        self.counter: Any = None  # counts passes since the last reduction; made in the first
        self._allreduce = allreduce_func
        self._sparse_as_dense = sparse_as_dense
        self._average = average_aggregated_gradients
        self._process_set = process_set
        self._scale_local = scale_local_gradients
        self._name = name or "gradient_aggregation"
        self._local: dict[int, Any] = {}
        self._sums: dict[int, Any] = {}
        # Variables with a sum, kept here so that no other variable can get the same key.
        self._summed_variables: list[Any] = []

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of the variable `var`."""
        self._local[variable_key(var)] = var

    @without_autograph
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add up the gradients of a pass, and return the reduced sums if it completes a step.

        The results of other passes must not be applied; `apply_gradients` takes care of that.
        """
        variables = list(vars)
        results = [to_dense(gradient, self._sparse_as_dense) for gradient in grads]
        if self.backward_passes_per_step == 1:
            return self._reduce(results, variables)
        self._make_variables(results, variables)
        sums = {
            index: self._sums[variable_key(variable)]
            for index, variable in enumerate(variables)
            if variable_key(variable) in self._sums
        }
        added = [
            total.assign_add(results[index], read_value=False)
            for index, total in sums.items()
            if results[index] is not None
        ]
        added.append(self.counter.assign_add(1, read_value=False))

        def complete() -> list[tf.Tensor]:
            totals: list[Any] = [None] * len(variables)
            for index, total in sums.items():
                totals[index] = self._total(total)
            reduced = self._reduce(totals, variables)
            with run_after([reduced[index] for index in sums]):
                # Assign zeros: multiplying by zero would turn an infinity into NaN and keep it.
                cleared = [
                    total.assign(tf.zeros_like(total), read_value=False) for total in sums.values()
                ]
                cleared.append(self.counter.assign(0, read_value=False))
            with run_after(cleared):
                return [tf.identity(reduced[index]) for index in sums]

        def keep() -> list[tf.Tensor]:
            return [total.read_value() for total in sums.values()]

        with run_after(added):
            is_complete = tf.equal(self.counter.read_value(), self.backward_passes_per_step)
            computed = tf.cond(is_complete, complete, keep)
        for index, result in zip(sums, as_list(computed), strict=True):
            results[index] = result
        return results

    @without_autograph
    def apply_gradients(
        self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `apply_grads_closure` if the last pass completed a step, else only count the pass.

        `args` and `kwargs` are the arguments of the optimizer's `apply_gradients`. In eager
        execution return the closure's result, or None; in a graph return the op that does this.
        """
        if self.backward_passes_per_step == 1:
            return apply_grads_closure()
        if self.counter is None:
            raise ValueError("apply_gradients takes what compute_gradients returned: call it first")
        pairs = list(args[0]) if args else list(kwargs["grads_and_vars"])
        with run_after([gradient for gradient, _ in pairs]):
            is_complete = tf.equal(self.counter.read_value(), 0)
            return tf.cond(
                is_complete,
                lambda: _result(apply_grads_closure()),
                lambda: as_op([self._count_pass(optimizer, *args, **kwargs)]),
            )

    def _count_pass(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Increase the optimizer's counter, though nothing was applied."""
        return optimizer.iterations.assign_add(1)

    def _total(self, total: tf.Variable) -> tf.Tensor:
        """Return the sum or the average of the passes' gradients."""
        value = total.read_value()
        if not self._average:
            return value
        return value / tf.cast(self.backward_passes_per_step, value.dtype)

    def _reduce(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        results = list(gradients)
        shared = []
        for index, variable in enumerate(variables):
            if variable_key(variable) not in self._local:
                shared.append(index)
            elif self._scale_local and results[index] is not None:
                results[index] = scale_down(results[index], self._process_set)
        reduced = self._allreduce(
            [results[index] for index in shared], [variables[index] for index in shared]
        )
        for index, result in zip(shared, reduced, strict=True):
            results[index] = result
        return results

    def _make_variables(self, gradients: list[Any], variables: list[Any]) -> None:
        if self.counter is None:
            self.counter = new_variable(tf.TensorShape([]), tf.int32, f"{self._name}_counter")
        for number, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is not None and variable_key(variable) not in self._sums:
                self._summed_variables.append(variable)
                shape = tf.TensorShape(variable.shape)
                self._sums[variable_key(variable)] = new_variable(
                    shape, gradient.dtype, f"{self._name}_{number}"
                )


class LocalGradientAggregationHelper(GradientAggregation):
    """The helper of v1 optimizers and of Keras optimizers in v1 graphs.

    Its variables are local ones: v1 graphs initialise them with `local_variables_initializer`.

    Args:
        backward_passes_per_step: The number of passes to add up before the ranks exchange
            gradients.
        allreduce_func: A function that takes lists of gradients and of their variables, and returns
            the reduced gradients.
        sparse_as_dense: Whether to turn sparse gradients into dense ones; False by default.
        average_aggregated_gradients: Whether to divide the sum by the number of passes.
        rank: Accepted for compatibility.
        optimizer_type: `_OPTIMIZER_TYPE_KERAS` or `_OPTIMIZER_TYPE_LEGACY`: whether passes are
            counted in the optimizer's `iterations` or in the `global_step` that it is given.
        process_set: The ranks to reduce with; all ranks by default.
        scale_local_gradients: Whether to divide gradients that stay on their rank by the number of
            ranks; True by default.
        name: Prefix for the names of its variables.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Allreduce,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: str,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set,
            scale_local_gradients,
            name,
        )
        self.rank = rank
        self.optimizer_type = optimizer_type

    def _count_pass(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer_type == self._OPTIMIZER_TYPE_KERAS:
            return super()._count_pass(optimizer, *args, **kwargs)
        global_step = kwargs.get("global_step", args[1] if len(args) > 1 else None)
        return None if global_step is None else tf.compat.v1.assign_add(global_step, 1)


def to_dense(gradient: Any, sparse_as_dense: bool) -> Any:
    """Return a gradient as a dense tensor, which can be added up.

    Raises:
        ValueError: The gradient is sparse, and the user has not allowed to make it dense.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if not sparse_as_dense:
        raise ValueError(
            "gradients of embeddings (tf.IndexedSlices) can be added up over several passes "
            "(backward_passes_per_step > 1) only with sparse_as_dense=True"
        )
    return tf.convert_to_tensor(gradient)


def new_variable(shape: tf.TensorShape, dtype: tf.DType, name: str) -> tf.Variable:
    """Make a variable of zeros that outlives the graph of a tf.function.

    It is a local variable, so it is not trained, saved or broadcast.
    """
    with tf.init_scope():
        return tf.compat.v1.Variable(
            tf.zeros(shape, dtype),
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            use_resource=True,
            name=name,
        )


def run_after(values: Sequence[Any]) -> Any:
    """Return a scope whose graph ops run after `values`; eager ops run in order anyway."""
    return tf.control_dependencies([] if tf.executing_eagerly() else _present(values))


def as_op(values: Sequence[Any], name: str | None = None) -> Any:
    """Return the graph op that runs all of `values`; in eager execution they have run already."""
    return None if tf.executing_eagerly() else tf.group(*_present(values), name=name)


def _present(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _result(value: Any) -> Any:
    """Return what `apply_gradients` returned, in a graph as an op: both branches must match."""
    return value if tf.executing_eagerly() else as_op([value])
