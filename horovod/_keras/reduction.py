"""What a distributed optimizer does with the gradients of a step, on every backend.

`Distribution` holds the arguments of `DistributedOptimizer`, which makes it. The reduction itself
is that of `horovod.tensorflow` where TensorFlow computes, and `HostReduction` elsewhere, which
hands torch tensors to the engine: those of the torch backend, or the memory of JAX's arrays
(`horovod._keras.jax_reduction`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.common.util import resolve_reduce_op, split_list
from horovod.engine.runtime import runtime
from horovod.torch.mpi_ops import grouped_allreduce_, grouped_allreduce_async_, synchronize


@dataclasses.dataclass
class Distribution:
    """How an optimizer uses the gradients of all ranks."""

    name: str | None = None
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: ReduceOp = Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    # Takes gradients and their variables, and returns the reduced gradients; made by `start`.
    reduce: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.op = resolve_reduce_op(self.op, None)
        if self.op not in (Average, Sum):
            raise ValueError(f"a Keras optimizer takes op=Average or op=Sum, not {self.op!r}")
        if not self.gradient_predivide_factor > 0:
            raise ValueError(
                "gradient_predivide_factor must be a positive number, not "
                f"{self.gradient_predivide_factor!r}"
            )
        if self.gradient_predivide_factor != 1.0 and self.op is not Average:
            raise ValueError("gradient_predivide_factor needs op=Average")
        passes = self.backward_passes_per_step
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ValueError(f"backward_passes_per_step must be positive, not {passes!r}")
        if not _is_groups(self.groups):
            raise ValueError(
                "groups must be a positive number or a list of lists of variables, not "
                f"{self.groups!r}"
            )

    def start(self, backend: str) -> None:
        """Get ready to reduce what `backend` computes."""
        self.reduce = self._reduction(backend)

    def register_local(self, variable: Any) -> None:
        """Leave the gradient of this variable to this rank."""
        self.reduce.register_local(variable)

    def _reduction(self, backend: str) -> Any:
        if backend == "tensorflow":
            from horovod.tensorflow.compression import Compression
            from horovod.tensorflow.reduced_gradients import OptimizerReduction

            return OptimizerReduction(
                op=self.op,
                compression=self.compression or Compression.none,
                sparse_as_dense=self.sparse_as_dense,
                gradient_predivide_factor=self.gradient_predivide_factor,
                groups=self.groups,
                process_set=self.process_set,
                scale_local_gradients=self.scale_local_gradients,
                name=self.name or "DistributedOptimizer",
                device_dense=self.device_dense,
                device_sparse=self.device_sparse,
            )
        if backend == "jax":
            from horovod._keras.jax_reduction import JaxReduction

            return JaxReduction(self)
        return HostReduction(self)


def _is_groups(groups: Any) -> bool:
    if isinstance(groups, int) and not isinstance(groups, bool):
        return groups > 0
    return groups is None or (
        isinstance(groups, list) and all(isinstance(group, (list, tuple)) for group in groups)
    )


class HostReduction:
    """Reduces torch tensors in place: one grouped allreduce for a step, or one for each group."""

    def __init__(self, distribution: Distribution) -> None:
        self._terms = distribution
        self._name = distribution.name or "DistributedOptimizer"
        self._local: dict[int, Any] = {}

    def register_local(self, variable: Any) -> None:
        self._local[id(variable)] = variable  # held, so that no other gets its identity

    @torch.compiler.disable
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients in the same order; None where there is none."""
        return self.reduce(list(gradients), variables)

    def take_notes(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[int]:
        """What has been done to gradients before: nothing. TensorFlow's tapes may reduce them."""
        return [0] * len(gradients)

    def reduce_rest(
        self, gradients: Sequence[Any], variables: Sequence[Any], done: Sequence[int]
    ) -> list[Any]:
        """Reduce the gradients that nothing has been done to: all."""
        return self(gradients, variables)

    def reduce(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        terms = self._terms
        if is_alone(terms.process_set):
            runtime.statistics.end_step()
            return gradients
        places = []
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if id(variables[place]) not in self._local:
                places.append(place)
            elif terms.scale_local_gradients:
                gradients[place] = gradient / (terms.process_set.size() or 1)
        groups = self._grouped(places, variables)
        sent = [[self._compressed(gradients[place]) for place in group] for group in groups]
        self._allreduce([[tensor for tensor, _ in group] for group in sent])
        for group, pairs in zip(groups, sent, strict=True):
            for place, (tensor, context) in zip(group, pairs, strict=True):
                if tensor is not gradients[place]:
                    gradients[place] = terms.compression.decompress(tensor, context)
        runtime.statistics.end_step(len(groups))
        return gradients

    def _compressed(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        compression = self._terms.compression
        return (gradient, None) if compression is None else compression.compress(gradient)

    def _allreduce(self, groups: list[list[torch.Tensor]]) -> None:
        terms = self._terms

        def start(function: Callable[..., Any], number: int) -> Any:
            return function(
                groups[number],
                name=f"{self._name}.{number}",
                op=terms.op,
                prescale_factor=1.0 / terms.gradient_predivide_factor,
                postscale_factor=terms.gradient_predivide_factor,
                process_set=terms.process_set,
            )

        if len(groups) == 1:
            start(grouped_allreduce_, 0)  # nothing to do but to wait for it
            return
        for handle in [start(grouped_allreduce_async_, number) for number in range(len(groups))]:
            synchronize(handle)

    def _grouped(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """The places of gradients, in the groups that they are reduced in."""
        groups = self._terms.groups
        if groups is None or not places:
            return [places] if places else []
        if isinstance(groups, int):
            return split_list(places, groups)
        left = {id(variables[place]): place for place in places}
        chosen = [[left.pop(key) for key in map(id, group) if key in left] for group in groups]
        return [group for group in chosen if group] + [[place] for place in left.values()]


def is_alone(process_set: ProcessSet) -> bool:
    """Whether there is nobody to reduce with. Where that is unknown, reducing will say so."""
    if not runtime.is_initialized() or process_set.size() is None:
        return False
    return process_set.size() == 1 or not process_set.included()
