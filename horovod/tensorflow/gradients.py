"""Reduces the gradients of a step, for tapes and optimizers.

They make a `GradientReduction` from their arguments and call it with the gradients of every step,
both eagerly and while a graph is built. All dense gradients travel in one operation.

So that no optimizer reduces gradients again, distributed tapes and the optimizers'
`compute_gradients` put marks on the tensors that they have reduced. They mark the variables, too,
because a script may clip or scale gradients, which makes new tensors, before it applies them. The
mark on a variable is valid in the graph (or the eager program) in which it was made, until one of
our optimizers applies a gradient to the variable.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.process_sets import ProcessSet
from horovod.engine.arguments import has_no_peers
from horovod.engine.collective import Reduction
from horovod.engine.runtime import runtime
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.call import Call
from horovod.tensorflow.ops.info_ops import set_size
from horovod.tensorflow.ops.reductions import reduce_group, reduce_slices


class GradientReduction:
    """Reduces gradients over the ranks of a process set.

    The options are those of an optimizer or tape, checked. Ranks match their reductions by `name`,
    so reductions that may run at the same time need different names. Gradients of variables that
    were passed to `register_local` are not reduced; `scale_local_gradients` divides them by the
    number of ranks, as an average does.
    """

    def __init__(self, options: OptimizerOptions, name: str) -> None:
        self._options = options
        self._dense_reduction = Reduction(options.op, *options.predivide_factors)
        self._process_set = options.process_set
        self._name = name
        self._local: dict[int, Any] = {}

    def register_local(self, variable: Any) -> None:
        """Do not reduce the gradient of this variable."""
        # Keep a reference, so that no other variable can get the same key.
        self._local[variable_key(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Return whether the gradient of this variable is not reduced."""
        return variable_key(variable) in self._local

    @bridge.without_autograph
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients in the same order, None for variables without one."""
        gradients, variables = list(gradients), list(variables)
        is_fixed = runtime.is_initialized() and not runtime.is_elastic()
        if not tf.executing_eagerly() and not is_fixed:
            return self._reduce_unless_single(gradients, variables)
        if has_no_peers(self._process_set) and not self._counts_single_steps():
            if gradients and tf.executing_eagerly():
                runtime.statistics.end_step()
            return gradients
        return self._reduce(gradients, variables)

    def _counts_single_steps(self) -> bool:
        """Return whether a graph of a single rank has to report its steps to the statistics.

        A graph op that calls Python is slow, so this happens only if the user asked for statistics.
        """
        return (
            runtime.config.stats_interval is not None
            and not tf.executing_eagerly()
            and self._process_set.size() == 1
            and self._process_set.included() is True
            and not bridge.is_compiled_by_xla()
        )

    def _reduce_unless_single(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Reduce in a graph that may outlive the ranks with which it is built.

        The graph asks each time it runs whether there are other ranks.
        """
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not present:
            return gradients
        given = [self._as_dense(gradients[index]) for index in present]
        (is_single,) = bridge.run(
            lambda *_: [torch.tensor(self._ends_step_as_single())],
            [],
            [tf.TensorSpec((), tf.bool)],
            "HorovodIsAlone",
        )
        results = tf.cond(
            is_single,
            lambda: [tf.identity(gradient) for gradient in given],
            lambda: self._reduce(given, [variables[index] for index in present]),
        )
        for index, result in zip(present, as_list(results), strict=True):
            gradients[index] = result
        return gradients

    def _ends_step_as_single(self) -> bool:
        """Return `has_no_peers` in a running graph; report the step, which nothing else does."""
        is_single = has_no_peers(self._process_set)
        if is_single:
            runtime.statistics.end_step()
        return is_single

    def _reduce(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        options = self._options
        results = [self._as_dense(gradient) for gradient in gradients]
        dense, sparse = [], []
        for index, gradient in enumerate(results):
            if gradient is None:
                continue
            if self.is_local(variables[index]):
                if options.scale_local_gradients:
                    results[index] = scale_down(gradient, self._process_set)
            elif isinstance(gradient, tf.IndexedSlices):
                sparse.append(index)
            else:
                dense.append(index)
        groups = options.divide(dense, variables, variable_key)
        names = [
            *(("HorovodGroupedAllreduce", f"{self._name}.{n}") for n in range(len(groups))),
            *(("HorovodAllreduce", f"{self._name}.sparse.{n}") for n in range(len(sparse))),
        ]
        calls = [Call(kind, name, True, self._process_set) for kind, name in names]
        if calls:
            calls[-1].buckets = len(calls)  # the last call completes the step
        for call, group in zip(calls, groups, strict=False):
            with bridge.device_scope(options.device_dense):
                given = [results[index] for index in group]
                reduced = reduce_group(call, given, self._dense_reduction, options.compression)
            for index, result in zip(group, reduced, strict=True):
                results[index] = result
        for call, index in zip(calls[len(groups) :], sparse, strict=True):
            with bridge.device_scope(options.device_sparse):
                results[index] = reduce_slices(call, results[index], Reduction(options.op))
        return results

    def _as_dense(self, gradient: Any) -> Any:
        if self._options.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient


def wire_name(name: str) -> str:
    """Return a name for a reduction, unique in a v1 graph, where all may run at the same time."""
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or graph.building_function:
        return name
    return str(graph.unique_name(name)).replace("/", ".")


def variable_key(variable: Any) -> int:
    """Return a key that a variable shares with the Keras variable around it, and no other."""
    return id(_mark_owner(variable))


def scale_down(gradient: Any, process_set: ProcessSet) -> Any:
    """Return a gradient divided by the number of ranks."""
    size = set_size(process_set)
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


def as_list(results: Any) -> list[Any]:
    """Return the result of `tf.cond` as a list: in v1 graphs it unpacks a list of one."""
    return list(results) if isinstance(results, (list, tuple)) else [results]


# -- gradients that are reduced already --------------------------------------------------------


class Done(enum.IntEnum):
    """The mark on a gradient: what has been done to it before it is applied."""

    NOTHING = 0
    REDUCED = 1
    ADDED_UP = 2  # added up over the passes of a step, and reduced


class _EagerProgram:
    """Stands for a graph where code runs eagerly."""


_MARK = "_horovod_done"


def mark(gradients: Sequence[Any], variables: Sequence[Any], done: Done) -> None:
    """Mark the gradients, and the variables to which they will be applied."""
    graph = weakref.ref(_current_graphs()[0])
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None:
            setattr(gradient, _MARK, done)
            setattr(_mark_owner(variable), _MARK, (done, graph))


def mark_of(gradient: Any) -> Done:
    """Return the mark on this tensor."""
    return getattr(gradient, _MARK, Done.NOTHING)


def take_marks(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Done]:
    """Return the marks of gradients that are applied now, and remove the variables' marks."""
    graphs = _current_graphs()
    marks = []
    for gradient, variable in zip(gradients, variables, strict=True):
        done = mark_of(gradient)
        on_variable, graph = getattr(_mark_owner(variable), _MARK, (Done.NOTHING, lambda: None))
        if any(graph() is each for each in graphs):
            delattr(_mark_owner(variable), _MARK)
            done = max(done, on_variable)
        marks.append(done)
    return marks


class OptimizerReduction(GradientReduction):
    """The reduction of an optimizer, which skips gradients that are reduced already."""

    take_marks = staticmethod(take_marks)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce the gradients that are applied now, except those marked as reduced."""
        return self.reduce_unmarked(gradients, variables, take_marks(gradients, variables))

    def reduce_unmarked(
        self, gradients: Sequence[Any], variables: Sequence[Any], marks: Sequence[Done]
    ) -> list[Any]:
        """Reduce the gradients whose mark is `NOTHING`."""
        results = list(gradients)
        rest = [index for index, done in enumerate(marks) if done is Done.NOTHING]
        reduced = super().__call__(
            [results[index] for index in rest], [variables[index] for index in rest]
        )
        for index, gradient in zip(rest, reduced, strict=True):
            results[index] = gradient
        return results


def _mark_owner(variable: Any) -> Any:
    """Return the object that carries a variable's mark; a Keras variable shares the inner one's."""
    return getattr(variable, "handle", variable)


def _current_graphs() -> list[Any]:
    """Return the graph that is being built and those around it, or a stand-in in eager code."""
    if tf.executing_eagerly():
        return [_EagerProgram]
    graphs = []
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs
