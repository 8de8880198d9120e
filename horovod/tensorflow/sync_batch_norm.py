"""Batch normalisation over the batches of all ranks, for tf.keras.

A layer computes what an ordinary layer computes on the concatenated batches of all ranks, even if
these have different sizes. The gradients are those of the sum of the ranks' losses.

A forward pass is one collective, and so is its gradient. Every rank writes its counts, means and
variances into its own row of a table of zeros, and the tables are summed. So each rank gets the
rows of all ranks, and combines variances from differences of means (sums of squares would lose
precision where the mean is large), with the same bits on all ranks. Unlike an allgather this works
when a rank has joined: its row is zero, which means that it has no samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.common.reduce_op import Sum
from horovod.engine.collective import WORLD, Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from horovod.tensorflow.gradients import wire_name
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.call import make_differentiable
from horovod.tensorflow.ops.info_ops import own_rank
from horovod.tensorflow.ops.reductions import allreduce

# tf-keras, not Keras 3
_IS_LEGACY = hasattr(tf.keras.layers.BatchNormalization, "_calculate_mean_and_var")


@tf.keras.utils.register_keras_serializable(package="horovod")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch normalisation with the statistics of all ranks' batches.

    In training all ranks must run their layers equally often and in the same order.

    Args:
        fused: Accepted for compatibility; False by default.
        **kwargs: The arguments of `tf.keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused` is True or None: the fused kernel sees the batch of one rank only.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused is None or fused:
            raise ValueError(
                "SyncBatchNormalization cannot use the fused kernel, which sees the batch of one "
                "rank only: leave out `fused`"
            )
        if _IS_LEGACY:
            kwargs["fused"] = False
        super().__init__(**kwargs)

    @bridge.without_autograph
    def _calculate_mean_and_var(
        self, inputs: Any, reduction_axes: Sequence[int], keep_dims: bool, mask: Any = None
    ) -> tuple[Any, Any]:
        """Return the mean and variance by which tf-keras normalises."""
        rows, shape = _local_statistics(inputs, list(reduction_axes), mask)
        statistics = [rows[1], rows[2]] if _is_single() else _combine_statistics(_gather_rows(rows))
        mean, variance = (tf.reshape(vector, shape) for vector in statistics)
        if keep_dims:
            return mean, variance
        return tf.squeeze(mean, reduction_axes), tf.squeeze(variance, reduction_axes)

    if not _IS_LEGACY:

        def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
            """Return the mean and variance by which Keras 3 normalises."""
            return self._calculate_mean_and_var(inputs, self._reduction_axes, False, mask)


def _is_single() -> bool:
    """Return whether there are no other ranks, now and when the present graph runs."""
    if not runtime.is_initialized() or (runtime.is_elastic() and not tf.executing_eagerly()):
        return False
    return runtime.topology.size == 1


def _local_statistics(inputs: tf.Tensor, axes: list[int], mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return rows of counts, means and biased variances, and the unflattened shape of a row."""
    if mask is None:
        weights = None
        counts = tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), inputs.dtype)
    else:
        weights = tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
        weights = tf.broadcast_to(weights, tf.shape(inputs))
        counts = tf.reduce_sum(weights, axes, keepdims=True)

    def average(values: tf.Tensor) -> tf.Tensor:
        if weights is not None:
            values = tf.math.multiply_no_nan(values, weights)
        return tf.math.divide_no_nan(tf.reduce_sum(values, axes, keepdims=True), counts)

    mean = average(inputs)
    variance = average(tf.math.squared_difference(inputs, mean))
    counts = tf.broadcast_to(counts, tf.shape(mean))
    rows = tf.stack([tf.reshape(value, [-1]) for value in (counts, mean, variance)])
    return rows, tf.shape(mean)


def _gather_rows(rows: tf.Tensor) -> tf.Tensor:
    """Return the rows of all ranks, in the order of ranks."""
    name = wire_name("SyncBatchNormalization")

    def fill_table(tensors: list[torch.Tensor], op_name: str | None) -> list[torch.Tensor]:
        group = runtime.group(WORLD)
        table = tensors[0].new_zeros(group.size, *tensors[0].shape)
        table[group.rank] = tensors[0]
        allreduced = Collective(Kind.ALLREDUCE, op_name, reduction=Reduction(Sum))
        bridge.wait(runtime.submit(allreduced, [table], [table], background=False))
        return [table]

    def forward(own: tf.Tensor) -> list[tf.Tensor]:
        table = tf.TensorSpec([None, *own.shape], own.dtype)
        return bridge.run(fill_table, [own], [table], name, ignore_name_scope=True)

    def backward(gradient: tf.Tensor) -> list[tf.Tensor]:
        total = allreduce(gradient, op=Sum, name=f"{name}.grad", ignore_name_scope=True)
        return [tf.gather(total, own_rank())]

    return make_differentiable(forward, backward, [rows])[0]


def _combine_statistics(table: tf.Tensor) -> list[tf.Tensor]:
    """Return the mean and the biased variance over all ranks."""
    counts, means, variances = tf.unstack(table, num=3, axis=1)
    weights = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, 0))
    mean = tf.reduce_sum(weights * means, 0)
    variances += tf.math.squared_difference(means, mean)
    return [mean, tf.reduce_sum(weights * variances, 0)]
