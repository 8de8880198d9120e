"""Reduces the gradients of a step, for tapes and optimizers.

They make a `GradientReduction` from their arguments and call it with the gradients of every step,
both eagerly and while a graph is built. All dense gradients travel in one operation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.common.optimizer_arguments import check_groups, predivide_factors
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.common.util import resolve_reduce_op, split_list
from horovod.engine.collective import Reduction
from horovod.engine.runtime import runtime
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.allreduce_ops import reduce_group, reduce_slices
from horovod.tensorflow.ops.call import Call
from horovod.tensorflow.ops.info_ops import set_size


class GradientReduction:
    """Reduces gradients over the ranks of a process set.

    The arguments are those of `DistributedOptimizer`. Variables that are in none of the lists in
    `groups` form a group each. Ranks match their reductions by `name`, so reductions that may run
    at the same time need different names. Gradients of variables that were passed to
    `register_local` are not reduced; `scale_local_gradients` divides them by the number of ranks,
    as an average does.
    """

    def __init__(
        self,
        *,
        op: ReduceOp = Average,
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "DistributedGradients",
        device_dense: str = "",
        device_sparse: str = "",
    ) -> None:
        self.op = resolve_reduce_op(op, None)
        factors = predivide_factors(gradient_predivide_factor, self.op)
        self._dense_reduction = Reduction(self.op, *factors)
        self.process_set = process_set
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        if num_groups:
            warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
            groups = num_groups if groups is None else groups
        self._groups = check_groups(groups)
        self._scale_local = scale_local_gradients
        self._name = name
        self._device_dense = device_dense
        self._device_sparse = device_sparse
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
        if self._is_single() and not self._counts_single_steps():
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
            and self.process_set.size() == 1
            and self.process_set.included() is True
            and not bridge.is_compiled_by_xla()
        )

    def _is_single(self) -> bool:
        """Return whether this rank has nobody to reduce with; False if that is not known yet."""
        if not runtime.is_initialized() or self.process_set.size() is None:
            return False
        return self.process_set.size() == 1 or not self.process_set.included()

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
            [tf.bool],
            [()],
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
        """Return `_is_single` in a running graph, and report the step, which nothing else does."""
        is_single = self._is_single()
        if is_single:
            runtime.statistics.end_step()
        return is_single

    def _reduce(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        results = [self._as_dense(gradient) for gradient in gradients]
        dense, sparse = [], []
        for index, gradient in enumerate(results):
            if gradient is None:
                continue
            if self.is_local(variables[index]):
                if self._scale_local:
                    results[index] = scale_down(gradient, self.process_set)
            elif isinstance(gradient, tf.IndexedSlices):
                sparse.append(index)
            else:
                dense.append(index)
        groups = self._group_indices(dense, variables)
        names = [
            *(("HorovodGroupedAllreduce", f"{self._name}.{n}") for n in range(len(groups))),
            *(("HorovodAllreduce", f"{self._name}.sparse.{n}") for n in range(len(sparse))),
        ]
        calls = [Call(kind, name, True, self.process_set) for kind, name in names]
        if calls:
            calls[-1].buckets = len(calls)  # the last call completes the step
        for call, group in zip(calls, groups, strict=False):
            with bridge.device_scope(self._device_dense):
                given = [results[index] for index in group]
                reduced = reduce_group(call, given, self._dense_reduction, self._compression)
            for index, result in zip(group, reduced, strict=True):
                results[index] = result
        for call, index in zip(calls[len(groups) :], sparse, strict=True):
            with bridge.device_scope(self._device_sparse):
                results[index] = reduce_slices(call, results[index], Reduction(self.op))
        return results

    def _as_dense(self, gradient: Any) -> Any:
        if self._sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient

    def _group_indices(self, dense: list[int], variables: list[Any]) -> list[list[int]]:
        """Cut the indices of dense gradients into the groups that are reduced together."""
        if self._groups is None or not dense:
            return [dense] if dense else []
        if isinstance(self._groups, int):
            return split_list(dense, self._groups)
        left = {variable_key(variables[index]): index for index in dense}
        groups = [
            [left.pop(key) for key in map(variable_key, group) if key in left]
            for group in self._groups
        ]
        grouped = {index for group in groups for index in group}
        rest = [[index] for index in dense if index not in grouped]
        return [group for group in groups if group] + rest


def wire_name(name: str) -> str:
    """Return a name for a reduction, unique in a v1 graph, where all may run at the same time."""
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or graph.building_function:
        return name
    return str(graph.unique_name(name)).replace("/", ".")


def variable_key(variable: Any) -> int:
    """Return a key that a variable shares with the Keras variable around it, and no other."""
    return id(getattr(variable, "handle", variable))


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
