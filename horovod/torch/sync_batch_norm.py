"""Batch normalisation over the batches of all ranks: ``hvd.SyncBatchNorm``.

Users put it where they would put ``torch.nn.BatchNorm1d/2d/3d``, or convert a whole model with
`SyncBatchNorm.convert_sync_batchnorm`. What a layer computes is what an ordinary one computes on
the ranks' batches put together, however unevenly they are dealt out; the gradients are those of
the sum of the ranks' losses, and the gradients of weight and bias are this rank's part, for
``DistributedOptimizer`` to reduce like any other.

A pass forward is one collective, and so is a pass backward. Forward, every rank has one row of a
table to put its count, mean and variance in, and the table is summed. That makes it a gather, so
that variances are combined from differences of means (sums of squares would cancel where the mean
is large), in any float type, with the same bits on all ranks. An allgather would do the same, but
costs the engine another exchange (of row counts) and stops when a rank has joined, whereas an
allreduce goes on: the row of a rank that has joined, or has no samples, says zero.
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
from horovod.common.reduce_op import Sum
from horovod.common.topology import Topology
from horovod.engine.arguments import FLOATING, set_id, set_size
from horovod.engine.runtime import runtime
from horovod.torch.allreduce_ops import allreduce

Tensor = torch.Tensor
Ranks = tuple[int, ...]
ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)

# Where torch has kernels for the parts of a batch normalisation; elsewhere we put them together.
_HAVE_KERNELS = frozenset({"cuda", "xpu"})


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
        eps: Added to the variance.
        momentum: Weight of a batch in the running statistics; None: all count alike.
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
        """Normalise `input`, with the other ranks when training. ValueError for input of a wrong
        shape.
        """
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
        output, mean, variance, count = _SyncBatchNorm.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, name, self.process_set
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance, count, input.numel() == 0)
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes at least 2 dimensions, not {input.dim()}")

    def _check_input(self, input: Tensor) -> None:
        """What torch itself checks, before other ranks wait for us."""
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
        if id(module) not in converted:  # a layer may be at several places in a model
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
    """A process set inside a layer that is copied or pickled: never copied with it.

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
    their layers together. A new `init` begins anew, as there may be ranks that have no past.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: Topology | None = None
        self._names: WeakKeyDictionary[SyncBatchNorm, dict[Ranks, str]] = WeakKeyDictionary()
        self._used: defaultdict[Ranks, Iterator[int]] = defaultdict(itertools.count)
        self._constructed: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)

    def next_number(self, process_set: ProcessSet) -> int:
        """For a new layer: how many were made for the set before it."""
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


class _SyncBatchNorm(torch.autograd.Function):
    """Normalise by the statistics of all ranks; also gives mean, biased variance and count."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        name: str,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _statistics(input, name, process_set)
        if input.numel() == 0:
            output = torch.empty_like(input)
        else:
            gain, shift = _as(weight, mean), _as(bias, mean)
            output = torch.native_batch_norm(input, gain, shift, mean, variance, False, 0.0, eps)[0]
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.arguments = eps, name, process_set
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # Autograd brings what is returned here to the types of input, weight and bias.
        if torch.is_grad_enabled():
            return *_differentiable_gradients(ctx, gradient), None, None, None
        input, weight, mean, inverse, count = ctx.saved_tensors
        _, name, process_set = ctx.arguments
        for_input, for_weight, for_bias = ctx.needs_input_grad[:3]
        if input.dtype is not mean.dtype and input.device.type not in _HAVE_KERNELS:
            # Half precision: else every step would round.
            gradient, input = gradient.to(mean.dtype), input.to(mean.dtype)
        sums = _local_sums(gradient, input, mean, inverse)
        to_bias, to_weight = sums.clone()
        to_input = None
        if for_input:
            _sum_over_ranks(sums, f"{name}.grad", process_set)
            to_input = _input_gradient(gradient, input, weight, mean, inverse, sums, count)
        gradients = to_input, to_weight if for_weight else None, to_bias if for_bias else None
        return *gradients, None, None, None


# -- forward --------------------------------------------------------------------------------


def _statistics(input: Tensor, name: str, process_set: ProcessSet) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel over all ranks, and the number of values in it."""
    features = input.shape[1]
    values = input.numel() // features if features else 0
    rank, size = process_set.rank(), set_size(process_set)
    assert rank is not None
    dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
    table = torch.zeros(size, 1 + 2 * features, dtype=dtype, device=input.device)
    if values:
        table[rank, 0] = values  # a float32 rounds it from 2**24 on: no more than it does the rest
        torch.cat(_local_statistics(input, dtype), out=table[rank, 1:])
    _sum_over_ranks(table, name, process_set)
    counts, means, variances = table[:, :1], table[:, 1 : features + 1], table[:, features + 1 :]
    count = counts.sum()
    if values < 2 and count == 1:
        raise ValueError(
            "batch normalisation needs more than one value for each feature to train, and the "
            "ranks' batches together have one"
        )
    weights = counts / count.clamp(min=1)
    mean = (weights * means).sum(0)
    variance = (weights * (variances + (means - mean).square())).sum(0)
    return mean, variance, count


def _local_statistics(input: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of this rank's batch."""
    if input.device.type in _HAVE_KERNELS:
        mean, inverse = torch.batch_norm_stats(input, torch.finfo(dtype).tiny)
        return mean, inverse.square().reciprocal()
    if input.is_cpu:
        # The type of the running statistics, which are not wanted here, is the result's type.
        ignored = torch.zeros(2, input.shape[1], dtype=dtype)
        mean, variance = torch.batch_norm_update_stats(input, ignored[0], ignored[1], 0.0)
        return mean, variance
    variance, mean = torch.var_mean(input.to(dtype), _all_but_channels(input), correction=0)
    return mean, variance


# -- backward -------------------------------------------------------------------------------


def _local_sums(gradient: Tensor, input: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Sums of the gradient, and of the gradient times the normalised input, by channel."""
    if input.numel() == 0:
        return mean.new_zeros(2, mean.numel())
    ones, only_sums = torch.ones_like(mean), [False, True, True]
    _, scaled, plain = torch.ops.aten.native_batch_norm_backward(
        gradient, input, ones, None, None, mean, inverse, True, 0.0, only_sums
    )
    return torch.stack([plain, scaled])


def _input_gradient(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    sums: Tensor,
    count: Tensor,
) -> Tensor:
    """weight * inverse * (gradient - its mean - normalised input * mean of their product)."""
    if input.numel() == 0:
        return torch.zeros_like(input)
    weight, (plain, scaled) = _as(weight, mean), sums
    if input.device.type in _HAVE_KERNELS:
        counts = count.to(torch.int32).view(1)
        return torch.batch_norm_backward_elemt(
            gradient, input, mean, inverse, weight, plain, scaled / inverse, counts
        )
    # Put as a * gradient + b * input + c it takes two passes over the data.
    a = inverse if weight is None else inverse * weight
    b = -a * inverse * scaled / count
    c = -a * plain / count - b * mean
    a, b, c = (_by_channel(vector, input) for vector in (a, b, c))
    return torch.addcmul(c, gradient, a).addcmul_(input, b)


def _differentiable_gradients(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """The gradients with a graph behind them, for who asks for second derivatives.

    Computes the layer once more from differentiable collectives and leaves the rest to autograd.
    """
    input, weight, _, _, count = ctx.saved_tensors
    eps, name, process_set = ctx.arguments
    dims = _all_but_channels(input)
    values, gradient = input.to(count.dtype), gradient.to(count.dtype)
    mean = allreduce(values.sum(dims), op=Sum, name=f"{name}.mean", process_set=process_set)
    values = values - _by_channel(mean / count, input)
    squares = values.square().sum(dims)
    squares = allreduce(squares, op=Sum, name=f"{name}.squares", process_set=process_set)
    output = values * _by_channel(torch.rsqrt(squares / count + eps), input)
    if weight is not None:
        output = output * _by_channel(weight.to(count.dtype), input)
    found: list[Tensor | None] = [None, None]
    wanted = [place for place in (0, 1) if ctx.needs_input_grad[place]]
    if wanted:
        sources = [(input, weight)[place] for place in wanted]
        gradients = torch.autograd.grad(output, sources, gradient, create_graph=True)
        for place, result in zip(wanted, gradients, strict=True):
            found[place] = result
    return [*found, gradient.sum(dims) if ctx.needs_input_grad[2] else None]


# -- both -----------------------------------------------------------------------------------


def _sum_over_ranks(tensor: Tensor, name: str, process_set: ProcessSet) -> None:
    tensors, identifier = [tensor], set_id(process_set)
    runtime.allreduce(
        tensors, tensors, name, Sum, process_set_id=identifier, background=False
    ).wait()


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _by_channel(vector: Tensor, input: Tensor) -> Tensor:
    """One value for each channel, shaped to be broadcast over `input`."""
    return vector.view(1, -1, *[1] * (input.dim() - 2))


def _as(vector: Tensor | None, statistic: Tensor) -> Tensor | None:
    """A parameter in the type of the statistics."""
    return None if vector is None else vector.to(statistic.dtype)
