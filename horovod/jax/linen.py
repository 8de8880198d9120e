"""Layers for flax.linen: ``from horovod.jax import linen as hvd_linen``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax.sync_batch_norm import feature_axes, normalise, reduction_axes, statistics

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm` with the statistics of the batches of all ranks.

    It has the variables of `flax.linen.BatchNorm`, so that a model can change from one to the
    other. While training, all ranks must run their layers equally often and in the same order.

    Attributes:
        use_running_average: Whether to use the statistics that were learnt, as in evaluation. None
            leaves the choice to the call.
        axis: Axis of the features. The default is -1, the last.
        momentum: The share of the running statistics that each batch keeps. The default is 0.99.
        epsilon: Number that is added to the variance. The default is 1e-5.
        dtype: Type of the result. By default it follows from input and parameters.
        param_dtype: Type of the parameters. The default is float32.
        use_bias: Whether to learn a bias. The default is True.
        use_scale: Whether to learn a scale. The default is True.
        bias_init: Initialiser of the bias. By default zeros.
        scale_init: Initialiser of the scale. By default ones.
        axis_name: Not used: Horovod reduces over processes, not over an axis of a mesh.
        axis_index_groups: Not used, like `axis_name`.
        use_fast_variance: Not used: variances are combined without cancellation.
        force_float32_reductions: Whether running statistics are kept in float32. The default is
            True.
        process_set: Ranks whose batches are combined. By default all ranks.
        parent: Module that contains this one; flax sets it.
        name: Name of the module in flax.
    """

    process_set: ProcessSet = global_process_set

    @nn.compact
    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        axes = reduction_axes(x.ndim, self.axis)
        shape = tuple(x.shape[axis] for axis in feature_axes(x.ndim, self.axis))
        dtype = jnp.float32 if self.force_float32_reductions else self.param_dtype
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, dtype)
        running_variance = self.variable("batch_stats", "var", jnp.ones, shape, dtype)
        if use_running_average:
            mean, variance = running_mean.value, running_variance.value
        elif self.is_initializing():  # each rank initialises for itself
            mean, variance = x.mean(axes), x.var(axes)
        else:
            mean, variance = statistics(x, axes, mask, self.process_set)
            keep = self.momentum
            running_mean.value = keep * running_mean.value + (1 - keep) * mean
            running_variance.value = keep * running_variance.value + (1 - keep) * variance
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        y = normalise(x, mean, variance, scale, bias, axes, self.epsilon)
        return y.astype(self.dtype or jnp.result_type(x, self.param_dtype))
