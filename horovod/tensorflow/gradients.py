"""Reducing the gradients of a step: what tapes and optimizers have in common.

`GradientReduction` is made from their arguments and called with the gradients of every step, both
eagerly and while a graph is built. All dense gradients travel in one operation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.common.util import resolve_reduce_op, split_list
from horovod.engine.runtime import runtime
from horovod.tensorflow import bridge
from horovod.tensorflow.allreduce_ops import reduce_group, reduce_slices
from horovod.tensorflow.call import Call
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.info_ops import set_size
from horovod.tensorflow.reduction import Reduction


class GradientReduction:
    """Turns this rank's gradients into those of all ranks of a process set.

    `groups`: a number of parts to reduce the gradients in, or lists of the variables whose
    gradients belong together, others being on their own; None: all at once. `num_groups` is its
    older form. `gradient_predivide_factor` is divided by before the sum, and the rest of the
    average is taken after it. Ranks match their reductions by `name`, so those that may run at the
    same time need different ones. Gradients of variables given to `register_local` are not reduced,
    but with `scale_local_gradients` divided by the number of ranks, as those of an average are.
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
        if not gradient_predivide_factor > 0:
            raise ValueError(
                "gradient_predivide_factor must be a positive number, not "
                f"{gradient_predivide_factor!r}"
            )
        if gradient_predivide_factor != 1.0 and self.op is not Average:
            raise ValueError("gradient_predivide_factor needs op=Average")
        self.process_set = process_set
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._predivide = gradient_predivide_factor
        self._groups = _checked_groups(groups, num_groups)
        self._scale_local = scale_local_gradients
        self._name = name
        self._device_dense = device_dense
        self._device_sparse = device_sparse
        self._local: dict[int, Any] = {}

    def register_local(self, variable: Any) -> None:
        """Leave the gradient of this variable to this rank."""
        self._local[identity(variable)] = variable  # held, so that no other gets its identity

    def is_local(self, variable: Any) -> bool:
        return identity(variable) in self._local

    @bridge.unconverted
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients in the same order; None where there is none."""
        gradients, variables = list(gradients), list(variables)
        is_fixed = runtime.is_initialized() and not runtime.is_elastic()
        if not tf.executing_eagerly() and not is_fixed:
            return self._unless_alone(gradients, variables)
        if self._is_alone() and not self._counts_alone():
            if gradients and tf.executing_eagerly():
                runtime.statistics.end_step()
            return gradients
        return self._reduced(gradients, variables)

    def _counts_alone(self) -> bool:
        """Whether a graph has to tell us of its steps, though there is nobody to reduce with.

        An op of the graph that calls us takes long, so only if somebody wants reports.
        """
        return (
            runtime.config.stats_interval is not None
            and not tf.executing_eagerly()
            and self.process_set.size() == 1
            and self.process_set.included() is True
            and not bridge.is_compiled_by_xla()
        )

    def _is_alone(self) -> bool:
        """Whether there is nobody to reduce with. Where that is unknown, reducing will say so."""
        if not runtime.is_initialized() or self.process_set.size() is None:
            return False
        return self.process_set.size() == 1 or not self.process_set.included()

    def _unless_alone(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Like `_reduced`, in a graph that may outlive the ranks it is built with."""
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not present:
            return gradients
        given = [self._as_dense(gradients[index]) for index in present]
        (is_alone,) = bridge.run(
            lambda *_: [torch.tensor(self._is_alone_in_step())],
            [],
            [tf.bool],
            [()],
            "HorovodIsAlone",
        )
        results = tf.cond(
            is_alone,
            lambda: [tf.identity(gradient) for gradient in given],
            lambda: self._reduced(given, [variables[index] for index in present]),
        )
        for index, result in zip(present, as_list(results), strict=True):
            gradients[index] = result
        return gradients

    def _is_alone_in_step(self) -> bool:
        """`_is_alone`, in a graph that runs: nobody else will tell that this was a step."""
        is_alone = self._is_alone()
        if is_alone:
            runtime.statistics.end_step()
        return is_alone

    def _reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        results = [self._as_dense(gradient) for gradient in gradients]
        dense, sparse = [], []
        for index, gradient in enumerate(results):
            if gradient is None:
                continue
            if self.is_local(variables[index]):
                if self._scale_local:
                    results[index] = scaled_down(gradient, self.process_set)
            elif isinstance(gradient, tf.IndexedSlices):
                sparse.append(index)
            else:
                dense.append(index)
        groups = self._grouped(dense, variables)
        calls = [
            *(("HorovodGroupedAllreduce", f"{self._name}.{n}") for n in range(len(groups))),
            *(("HorovodAllreduce", f"{self._name}.sparse.{n}") for n in range(len(sparse))),
        ]
        made = [Call(kind, name, True, self.process_set) for kind, name in calls]
        if made:
            made[-1].buckets = len(made)  # the step is complete with it
        reduction = Reduction(self.op, 1.0 / self._predivide, self._predivide)
        for call, group in zip(made, groups, strict=False):
            with bridge.placed(self._device_dense):
                given = [results[index] for index in group]
                reduced = reduce_group(call, given, reduction, self._compression)
            for index, result in zip(group, reduced, strict=True):
                results[index] = result
        for call, index in zip(made[len(groups) :], sparse, strict=True):
            with bridge.placed(self._device_sparse):
                results[index] = reduce_slices(call, results[index], Reduction(self.op))
        return results

    def _as_dense(self, gradient: Any) -> Any:
        if self._sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient

    def _grouped(self, dense: list[int], variables: list[Any]) -> list[list[int]]:
        """The indices of dense gradients in the groups that they are reduced in."""
        if self._groups is None or not dense:
            return [dense] if dense else []
        if isinstance(self._groups, int):
            return split_list(dense, self._groups)
        place = {identity(variables[index]): index for index in dense}
        groups = [
            [place.pop(key) for key in map(identity, group) if key in place]
            for group in self._groups
        ]
        grouped = {index for group in groups for index in group}
        rest = [[index] for index in dense if index not in grouped]
        return [group for group in groups if group] + rest


def _checked_groups(groups: Any, num_groups: int) -> int | list[list[Any]] | None:
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups > 0:
            return groups
    elif isinstance(groups, list) and all(isinstance(group, (list, tuple)) for group in groups):
        return [list(group) for group in groups]
    raise ValueError(
        f"groups must be a positive number or a list of lists of variables, not {groups!r}"
    )


def wire_name(name: str) -> str:
    """A name for an operation. Those of a v1 graph may run all at once, and get different ones."""
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or graph.building_function:
        return name
    return str(graph.unique_name(name)).replace("/", ".")


def identity(variable: Any) -> int:
    """The same for a variable and for a Keras variable that wraps it, unlike all others."""
    return id(getattr(variable, "handle", variable))


def scaled_down(gradient: Any, process_set: ProcessSet) -> Any:
    """A gradient divided by the number of ranks."""
    size = set_size(process_set)
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


def as_list(results: Any) -> list[Any]:
    """What `tf.cond` returns for a list: in v1 graphs it unpacks a list of one."""
    return list(results) if isinstance(results, (list, tuple)) else [results]
