"""Reduces the gradients of a Keras optimizer that are torch tensors in host or device memory.

The torch backend hands over its gradients, and `horovod._keras.jax_reduction` the memory of JAX's
arrays. On TensorFlow `horovod.tensorflow.reduced_gradients` does this work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod._keras.distribution import Distribution
from horovod.common.optimizer_arguments import predivide_factors
from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list
from horovod.engine.runtime import runtime
from horovod.torch.mpi_ops import grouped_allreduce_, grouped_allreduce_async_, synchronize


class HostReduction:
    """Reduces torch tensors in place: one grouped allreduce for a step, or one for each group."""

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._name = distribution.name or "DistributedOptimizer"
        self._local: dict[int, Any] = {}

    def register_local(self, variable: Any) -> None:
        """Do not reduce the gradient of this variable."""
        # Keep a reference, so that no other variable can get the same id.
        self._local[id(variable)] = variable

    @torch.compiler.disable
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients in the same order, None for variables without one."""
        return self.reduce(list(gradients), variables)

    def take_marks(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[int]:
        """Return the marks of gradients that a tape has reduced; only TensorFlow's tapes do so."""
        return [0] * len(gradients)

    def reduce_unmarked(
        self, gradients: Sequence[Any], variables: Sequence[Any], marks: Sequence[int]
    ) -> list[Any]:
        """Reduce all gradients, since none of them is marked as reduced here."""
        return self(gradients, variables)

    def reduce(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce the tensors in the list, and return the list."""
        distribution = self._distribution
        if has_no_peers(distribution.process_set):
            runtime.statistics.end_step()
            return gradients
        indices = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if id(variables[index]) not in self._local:
                indices.append(index)
            elif distribution.scale_local_gradients:
                gradients[index] = gradient / (distribution.process_set.size() or 1)
        groups = self._group_indices(indices, variables)
        sent = [[self._compress(gradients[index]) for index in group] for group in groups]
        self._allreduce([[tensor for tensor, _ in group] for group in sent])
        for group, pairs in zip(groups, sent, strict=True):
            for index, (tensor, context) in zip(group, pairs, strict=True):
                if tensor is not gradients[index]:
                    gradients[index] = distribution.compression.decompress(tensor, context)
        runtime.statistics.end_step(len(groups))
        return gradients

    def _compress(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        compression = self._distribution.compression
        return (gradient, None) if compression is None else compression.compress(gradient)

    def _allreduce(self, groups: list[list[torch.Tensor]]) -> None:
        distribution = self._distribution
        prescale, postscale = predivide_factors(
            distribution.gradient_predivide_factor, distribution.op
        )

        def start(function: Callable[..., Any], number: int) -> Any:
            return function(
                groups[number],
                name=f"{self._name}.{number}",
                op=distribution.op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=distribution.process_set,
            )

        if len(groups) == 1:
            start(grouped_allreduce_, 0)  # blocking, since there is nothing to do meanwhile
            return
        for handle in [start(grouped_allreduce_async_, number) for number in range(len(groups))]:
            synchronize(handle)

    def _group_indices(self, indices: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Cut the indices of gradients into the groups that are reduced together."""
        groups = self._distribution.groups
        if groups is None or not indices:
            return [indices] if indices else []
        if isinstance(groups, int):
            return split_list(indices, groups)
        left = {id(variables[index]): index for index in indices}
        chosen = [[left.pop(key) for key in map(id, group) if key in left] for group in groups]
        return [group for group in chosen if group] + [[index] for index in left.values()]


def has_no_peers(process_set: ProcessSet) -> bool:
    """Return whether this rank has nobody to reduce with; False if that is not known yet."""
    if not runtime.is_initialized() or process_set.size() is None:
        return False
    return process_set.size() == 1 or not process_set.included()
