"""Batch normalisation over the batches of all ranks: ``hvd.SyncBatchNorm``.

Users put it where they would put ``torch.nn.BatchNorm1d/2d/3d``, or convert a whole model with
`SyncBatchNorm.convert_sync_batchnorm`. What a layer computes is what an ordinary one computes on
the ranks' batches put together, however unevenly they are dealt out; the gradients are those of
the sum of the ranks' losses, and the gradients of weight and bias are this rank's part, for
``DistributedOptimizer`` to reduce like any other.

What a pass forward and a pass backward compute is in `horovod.torch.ops.batch_norm`.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.topology import Topology
from horovod.engine.arguments import FLOATING, set_id
from horovod.engine.runtime import runtime
from horovod.torch.ops.batch_norm import BatchNormFunction

Tensor = torch.Tensor
Ranks = tuple[int, ...]
ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with the statistics of all ranks' batches, on any device.

    Takes input of at least two dimensions, (samples, features, ...). All ranks of `process_set`
    must run it equally often; a rank without data passes a batch of 0 samples. Ranks need not
    communicate, and do not, in evaluation mode with running statistics or in a set of one rank.

    Ranks match their layers by the order in which they first use them. Layers that are first used
    outside the main thread, where that order is a matter of chance, are matched by the order of
    their construction instead; where ranks differ in that too, set the attribute `name` of each
    such layer to a text that is the same on all ranks and differs between layers.

    Args:
        num_features: Size of the second dimension of the input.
        eps: Number that is added to the variance.
        momentum: Weight of a batch in the running statistics; with None all batches count alike.
        affine: Whether weight and bias are learned.
        track_running_stats: Whether running statistics are kept, for evaluation.
        process_set: The ranks whose batches count.

    Examples:
        >>> model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    """

    name: str | None
    process_set: ProcessSet

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set
        self.name = None
        self._number = _names.next_number(process_set)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, over all ranks in training. Raise ValueError for a wrong shape."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        ranks = runtime.process_set_ranks(set_id(self.process_set))
        if runtime.topology.rank not in ranks:
            raise ValueError(f"rank {runtime.topology.rank} does not belong to {self.process_set}")
        if len(ranks) == 1:
            return super().forward(input)
        self._check_input(input)
        name = _names.name_of(self, tuple(ranks))
        output: Tensor
        output, mean, variance, count = BatchNormFunction.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, name, self.process_set
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance, count, input.numel() == 0)
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes at least 2 dimensions, not {input.dim()}")

    def _check_input(self, input: Tensor) -> None:
        """Check what torch itself checks, before other ranks wait for us."""
        if input.dtype not in FLOATING:
            raise ValueError(f"SyncBatchNorm takes floating point input, not {input.dtype}")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"this SyncBatchNorm takes input of {self.num_features} features (the second "
                f"dimension), not of shape {tuple(input.shape)}"
            )

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor, maybe_empty: bool) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        if maybe_empty and not count:
            return  # no rank has a sample
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor or 0.0)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor or 0.0)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: ModuleT, process_set: ProcessSet = global_process_set
    ) -> ModuleT | SyncBatchNorm:
        """Put a `SyncBatchNorm` in place of every batch normalisation in a model.

        The new layers hold the parameters and buffers of those they replace, and take their
        statistics from the ranks of `process_set`. Returns `module`, or the new layer if `module`
        is itself a batch normalisation.
        """
        converted: ModuleT | SyncBatchNorm = cls._convert(module, process_set, {})
        return converted

    @classmethod
    def _convert(cls, module: Any, process_set: ProcessSet, converted: dict[int, Any]) -> Any:
        if id(module) not in converted:  # a model may use a layer several times
            if isinstance(module, _BatchNorm):
                converted[id(module)] = cls._from(module, process_set)
            else:
                converted[id(module)] = module
                for name, child in module._modules.items():
                    if child is not None:
                        module._modules[name] = cls._convert(child, process_set, converted)
        return converted[id(module)]

    @classmethod
    def _from(cls, layer: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ValueError(
                f"cannot convert {type(layer).__name__} while its number of features is unknown: "
                "run a batch through the model first"
            )
        statistics = layer.track_running_stats
        sync = cls(
            layer.num_features, layer.eps, layer.momentum, layer.affine, statistics, process_set
        )
        sync.weight, sync.bias = layer.weight, layer.bias
        sync.running_mean, sync.running_var = layer.running_mean, layer.running_var
        sync.num_batches_tracked = layer.num_batches_tracked
        return sync.train(layer.training)

    # A copy is another layer, to be matched by itself, on the same process set.

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["process_set"] = _SetReference(self.process_set)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {**state, "process_set": state["process_set"].process_set}
        super().__setstate__(own)  # type: ignore[no-untyped-call]
        self._number = _names.next_number(self.process_set)


class _SetReference:
    """Stands for the process set of a layer that is copied or pickled: the set is not copied.

    In another process the global set is that process's; another set must be registered there.
    """

    def __init__(self, process_set: ProcessSet | None, ranks: Sequence[int] = ()) -> None:
        self.process_set = process_set or (ProcessSet(ranks) if ranks else global_process_set)

    def __deepcopy__(self, memo: dict[int, Any]) -> _SetReference:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        is_global = self.process_set is global_process_set
        return _SetReference, (None, () if is_global else self.process_set.ranks or ())


class _Names:
    """The names of the layers' collectives: the same for a layer on all ranks, unlike all others.

    A layer's construction is a poor clue, because rank 0 may well build models (to look at, to
    evaluate) that the others do not have. Its first use is a good one, because ranks must use
    their layers together. Each `init` begins with new names, because new ranks know no old ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: Topology | None = None
        self._names: WeakKeyDictionary[SyncBatchNorm, dict[Ranks, str]] = WeakKeyDictionary()
        self._used: defaultdict[Ranks, Iterator[int]] = defaultdict(itertools.count)
        self._constructed: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)

    def next_number(self, process_set: ProcessSet) -> int:
        """Return the number of a new layer: how many were made for the set before it."""
        is_global = process_set is global_process_set
        with self._lock:
            return next(self._constructed[None if is_global else tuple(process_set.ranks or ())])

    def name_of(self, layer: SyncBatchNorm, ranks: Ranks) -> str:
        if layer.name is not None:
            return f"sync_batch_norm.{layer.name}"
        with self._lock:
            if self._job is not runtime.topology:
                self._job = runtime.topology
                self._names.clear()
                self._used.clear()
            names = self._names.setdefault(layer, {})
            if ranks not in names:
                if threading.current_thread() is threading.main_thread():
                    names[ranks] = f"sync_batch_norm.use{next(self._used[ranks])}"
                else:
                    names[ranks] = f"sync_batch_norm.layer{layer._number}"
            return names[ranks]


_names = _Names()
