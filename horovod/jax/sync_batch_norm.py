"""Batch normalisation over the batches of all ranks, for the layers for flax.

`statistics` computes what an ordinary layer computes on the concatenated batches of all ranks, even
if these have different sizes. The gradients are those of the sum of the ranks' losses.

A forward pass is one collective, and so is its gradient. Every rank writes its counts, means and
variances into its own row of a table of zeros, and the tables are summed. So each rank gets the
rows of all ranks, and combines variances from differences of means (sums of squares would lose
precision where the mean is large), with the same bits on all ranks. Unlike an allgather this works
when a rank has joined: its row is zero, which means that it has no samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import Sum
from horovod.engine.arguments import set_id
from horovod.engine.runtime import runtime
from horovod.jax.compiled import dispatch
from horovod.jax.reductions import allreduce


def statistics(x: Any, axes: Sequence[int], mask: Any, process_set: ProcessSet) -> tuple[Any, Any]:
    """Return the mean and the biased variance over `axes` and over the ranks."""
    own = _own_statistics(x, tuple(axes), mask)
    group = runtime.group(set_id(process_set))
    if group.size == 1:
        return own[1], own[2]
    dispatch.has_sized_programs = True
    table = jnp.zeros((group.size, *own.shape), own.dtype).at[group.rank].set(own)
    counts, means, variances = jnp.moveaxis(allreduce(table, op=Sum, process_set=process_set), 1, 0)
    weights = counts / jnp.maximum(counts.sum(0), 1)
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + jnp.square(means - mean))).sum(0)


def _own_statistics(x: Any, axes: tuple[int, ...], mask: Any) -> Any:
    """Return rows of counts, means and biased variances of this rank's batch."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    where = None if mask is None else jnp.broadcast_to(mask, x.shape)
    ones = jnp.ones_like(x) if where is None else where.astype(x.dtype)
    counts = ones.sum(axes)
    divisor = jnp.maximum(counts, 1)
    mean = x.sum(axes, where=where) / divisor
    centred = jnp.square(x - jnp.expand_dims(mean, axes))
    return jnp.stack([counts, mean, centred.sum(axes, where=where) / divisor])


def normalise(
    x: Any,
    mean: Any,
    variance: Any,
    scale: Any,
    bias: Any,
    axes: Sequence[int],
    epsilon: float,
) -> Any:
    """Normalise `x` by these statistics, and apply the learnt scale and bias."""
    axes = tuple(axes)
    factor = lax.rsqrt(variance + epsilon)
    if scale is not None:
        factor = factor * scale
    y = (x - jnp.expand_dims(mean, axes)) * jnp.expand_dims(factor, axes)
    return y if bias is None else y + jnp.expand_dims(bias, axes)


def feature_axes(ndim: int, axis: int | Sequence[int]) -> tuple[int, ...]:
    """Return the axes of the features, as numbers from 0."""
    given = axis if isinstance(axis, Sequence) else (axis,)
    return tuple(sorted(each % ndim for each in given))


def reduction_axes(ndim: int, axis: int | Sequence[int]) -> tuple[int, ...]:
    """Return all other axes, over which statistics are computed."""
    kept = feature_axes(ndim, axis)
    return tuple(each for each in range(ndim) if each not in kept)
