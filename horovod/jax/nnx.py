"""Layers for flax.nnx: ``from horovod.jax import nnx as hvd_nnx``."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax.sync_batch_norm import normalise, reduction_axes, statistics

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` with the statistics of the batches of all ranks.

    It has the variables of `flax.nnx.BatchNorm`. While training, all ranks must run their layers
    equally often and in the same order.

    Args:
        *args: Arguments of `flax.nnx.BatchNorm`.
        process_set: Ranks whose batches are combined. By default all ranks.
        **kwargs: Further arguments of `flax.nnx.BatchNorm`.
    """

    def __init__(
        self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.process_set = process_set

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise ValueError(
                "pass use_running_average to SyncBatchNorm or to the call: True to use what it has "
                "learnt, False when training"
            )
        axes = reduction_axes(x.ndim, self.axis)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        x, mean, variance, scale, bias = self.promote_dtype(
            (x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype
        )
        if not use_running_average:
            mean, variance = statistics(x, axes, mask, self.process_set)
            for running, new in ((self.mean, mean), (self.var, variance)):
                updated = self.momentum * running[...] + (1 - self.momentum) * new
                running[...] = jax.lax.stop_gradient(updated)
        return normalise(x, mean, variance, scale, bias, axes, self.epsilon).astype(x.dtype)
