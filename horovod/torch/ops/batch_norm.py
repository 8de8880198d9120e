"""What a batch normalisation over all ranks computes, forward and backward. For `SyncBatchNorm`.

A pass forward is one collective, and so is a pass backward. Forward, every rank has one row of a
table to put its count, mean and variance in, and the table is summed. That makes it a gather, so
that variances are combined from differences of means (sums of squares would cancel where the mean
is large), in any float type, with the same bits on all ranks. An allgather would do the same, but
costs the engine another exchange (of row counts) and stops when a rank has joined, whereas an
allreduce goes on: the row of a rank that has joined, or has no samples, says zero.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import Sum
from horovod.engine.arguments import set_size
from horovod.torch.ops.allreduce import allreduce, allreduce_

Tensor = torch.Tensor

# Devices with kernels of torch for the parts of a batch normalisation; elsewhere we compute them.
_HAVE_KERNELS = frozenset({"cuda", "xpu"})


class BatchNormFunction(torch.autograd.Function):
    """Normalise by the statistics of all ranks; also return mean, biased variance and count."""

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
            # Half precision, in which every step would round.
            gradient, input = gradient.to(mean.dtype), input.to(mean.dtype)
        sums = _local_sums(gradient, input, mean, inverse)
        to_bias, to_weight = sums.clone()
        to_input = None
        if for_input:
            allreduce_(sums, name=f"{name}.grad", op=Sum, process_set=process_set)
            to_input = _input_gradient(gradient, input, weight, mean, inverse, sums, count)
        gradients = to_input, to_weight if for_weight else None, to_bias if for_bias else None
        return *gradients, None, None, None


# -- forward --------------------------------------------------------------------------------


def _statistics(input: Tensor, name: str, process_set: ProcessSet) -> tuple[Tensor, Tensor, Tensor]:
    """Return each channel's mean and biased variance over all ranks, and its number of values."""
    features = input.shape[1]
    values = input.numel() // features if features else 0
    rank, size = process_set.rank(), set_size(process_set)
    assert rank is not None
    dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
    table = torch.zeros(size, 1 + 2 * features, dtype=dtype, device=input.device)
    if values:
        table[rank, 0] = values  # float32 rounds it from 2**24 on, as it rounds the rest
        torch.cat(_local_statistics(input, dtype), out=table[rank, 1:])
    allreduce_(table, name=name, op=Sum, process_set=process_set)
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
    """Return the mean and biased variance of each channel of this rank's batch."""
    if input.device.type in _HAVE_KERNELS:
        mean, inverse = torch.batch_norm_stats(input, torch.finfo(dtype).tiny)
        return mean, inverse.square().reciprocal()
    if input.is_cpu:
        # The result has the type of the running statistics, which are not wanted here.
        ignored = torch.zeros(2, input.shape[1], dtype=dtype)
        mean, variance = torch.batch_norm_update_stats(input, ignored[0], ignored[1], 0.0)
        return mean, variance
    variance, mean = torch.var_mean(input.to(dtype), _all_but_channels(input), correction=0)
    return mean, variance


# -- backward -------------------------------------------------------------------------------


def _local_sums(gradient: Tensor, input: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Return each channel's sums of the gradient, and of gradient times normalised input."""
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
    """Return weight * inverse * (gradient - its mean - normalised input * their product's mean)."""
    if input.numel() == 0:
        return torch.zeros_like(input)
    weight, (plain, scaled) = _as(weight, mean), sums
    if input.device.type in _HAVE_KERNELS:
        counts = count.to(torch.int32).view(1)
        return torch.batch_norm_backward_elemt(
            gradient, input, mean, inverse, weight, plain, scaled / inverse, counts
        )
    # Written as a * gradient + b * input + c it takes two passes over the data.
    a = inverse if weight is None else inverse * weight
    b = -a * inverse * scaled / count
    c = -a * plain / count - b * mean
    a, b, c = (_by_channel(vector, input) for vector in (a, b, c))
    return torch.addcmul(c, gradient, a).addcmul_(input, b)


def _differentiable_gradients(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """Return the gradients with a graph behind them, for second derivatives.

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
    wanted = [index for index in (0, 1) if ctx.needs_input_grad[index]]
    if wanted:
        sources = [(input, weight)[index] for index in wanted]
        gradients = torch.autograd.grad(output, sources, gradient, create_graph=True)
        for index, result in zip(wanted, gradients, strict=True):
            found[index] = result
    return [*found, gradient.sum(dims) if ctx.needs_input_grad[2] else None]


# -- both -----------------------------------------------------------------------------------


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _by_channel(vector: Tensor, input: Tensor) -> Tensor:
    """Return one value for each channel in a shape that broadcasts over `input`."""
    return vector.view(1, -1, *[1] * (input.dim() - 2))


def _as(vector: Tensor | None, statistic: Tensor) -> Tensor | None:
    """Return a parameter in the type of the statistics."""
    return None if vector is None else vector.to(statistic.dtype)
