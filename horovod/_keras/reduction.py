"""The options of a distributed Keras optimizer, and the reduction of gradients as torch tensors.

The torch backend hands over its gradients, and `horovod._keras.jax_reduction` the memory of JAX's
arrays. On TensorFlow `horovod.tensorflow.gradients` reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.reduce_op import Average, Sum
from horovod.engine.arguments import has_no_peers
from horovod.engine.runtime import runtime
from horovod.torch.mpi_ops import grouped_allreduce_, grouped_allreduce_async_, synchronize
from horovod.torch.ops.untraced import leaves_graph
from horovod.torch.optimizers.local_steps import check_within


class Distribution:
    """The checked options of a `DistributedOptimizer`, and the object that reduces by them."""

    def __init__(self, options: OptimizerOptions) -> None:
        self.options = options = options.checked(Average, Sum)
        if options.schedule.local_steps is not None:
            check_within(options.schedule.within, options.process_set)
            if options.backward_passes_per_step != 1:
                raise ValueError(
                    "local_steps does not go with backward_passes_per_step: pass "
                    "gradient_accumulation_steps to the optimizer itself"
                )
        # Whether the ranks step with their own gradients; `horovod._keras.local_steps` sets it.
        self.is_local = False
        # Takes gradients and their variables, and returns the reduced gradients. It depends on the
        # backend, so `horovod._keras.optimizer` sets it when the optimizer is known.
        self.reduce: Any = None


class HostReduction:
    """Reduces torch tensors in place: one grouped allreduce for a step, or one for each group."""

    def __init__(self, options: OptimizerOptions, name: str) -> None:
        self._options = options
        self._name = name
        self._local: dict[int, Any] = {}

    def register_local(self, variable: Any) -> None:
        """Do not reduce the gradient of this variable."""
        # Keep a reference, so that no other variable can get the same id.
        self._local[id(variable)] = variable

    @leaves_graph("Horovod's exchange of gradients cannot be traced with fullgraph=True")
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
        options = self._options
        if has_no_peers(options.process_set):
            runtime.statistics.end_step()
            return gradients
        indices = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if id(variables[index]) not in self._local:
                indices.append(index)
            elif options.scale_local_gradients:
                gradients[index] = gradient / (options.process_set.size() or 1)
        groups = options.divide(indices, variables)
        compression = options.compression
        sent = [[compression.compress(gradients[index]) for index in group] for group in groups]
        self._allreduce([[tensor for tensor, _ in group] for group in sent])
        for group, pairs in zip(groups, sent, strict=True):
            for index, (tensor, context) in zip(group, pairs, strict=True):
                if tensor is not gradients[index]:
                    gradients[index] = compression.decompress(tensor, context)
        runtime.statistics.end_step(len(groups))
        return gradients

    def _allreduce(self, groups: list[list[torch.Tensor]]) -> None:
        prescale, postscale = self._options.predivide_factors

        def start(function: Callable[..., Any], number: int) -> Any:
            return function(
                groups[number],
                name=f"{self._name}.{number}",
                op=self._options.op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=self._options.process_set,
            )

        if len(groups) == 1:
            start(grouped_allreduce_, 0)  # blocking, since there is nothing to do meanwhile
            return
        for handle in [start(grouped_allreduce_async_, number) for number in range(len(groups))]:
            synchronize(handle)
