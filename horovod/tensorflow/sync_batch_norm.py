"""Batch normalisation over the batches of all ranks, for tf.keras.

A layer computes what an ordinary one computes on the ranks' batches put together, however unevenly
they are dealt out; the gradients are those of the sum of the ranks' losses.

A pass forward is one collective, and so is its gradient. Every rank has one row of a table to put
its counts, means and variances in, and the table is summed. That makes it a gather, so that
variances are combined from differences of means (sums of squares would cancel where the mean is
large), with the same bits on all ranks; and unlike an allgather it goes on when a rank has joined,
whose row then says that it has no samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.common.reduce_op import Sum
from horovod.engine.job import WORLD
from horovod.engine.runtime import runtime
from horovod.tensorflow import bridge
from horovod.tensorflow.allreduce_ops import allreduce
from horovod.tensorflow.call import differentiable
from horovod.tensorflow.gradients import wire_name
from horovod.tensorflow.info_ops import own_rank

# tf-keras, not Keras 3
_IS_LEGACY = hasattr(tf.keras.layers.BatchNormalization, "_calculate_mean_and_var")


@tf.keras.utils.register_keras_serializable(package="horovod")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch normalisation with the statistics of all ranks' batches.

    Takes the arguments of `tf.keras.layers.BatchNormalization`. When training, all ranks must run
    their layers equally often and in the same order.

    Args:
        fused: Accepted for compatibility; True is a ValueError, as the fused kernel sees the
            batch of one rank only.
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

    @bridge.unconverted
    def _calculate_mean_and_var(
        self, inputs: Any, reduction_axes: Sequence[int], keep_dims: bool, mask: Any = None
    ) -> tuple[Any, Any]:
        """What legacy Keras normalises by."""
        rows, shape = _local_statistics(inputs, list(reduction_axes), mask)
        statistics = [rows[1], rows[2]] if _is_alone() else _combined(_gathered(rows))
        mean, variance = (tf.reshape(vector, shape) for vector in statistics)
        if keep_dims:
            return mean, variance
        return tf.squeeze(mean, reduction_axes), tf.squeeze(variance, reduction_axes)

    if not _IS_LEGACY:

        def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
            """What Keras 3 normalises by."""
            return self._calculate_mean_and_var(inputs, self._reduction_axes, False, mask)


def _is_alone() -> bool:
    """Whether this rank's batch is all there is, also when a graph runs later."""
    if not runtime.is_initialized() or (runtime.is_elastic() and not tf.executing_eagerly()):
        return False
    return runtime.topology.size == 1


def _local_statistics(inputs: tf.Tensor, axes: list[int], mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Rows of counts, means and biased variances, and the shape of each with all dimensions."""
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


def _gathered(rows: tf.Tensor) -> tf.Tensor:
    """The rows of all ranks, by rank."""
    name = wire_name("SyncBatchNormalization")

    def place(tensors: list[torch.Tensor], op_name: str | None) -> list[torch.Tensor]:
        group = runtime.group(WORLD)
        table = tensors[0].new_zeros(group.size, *tensors[0].shape)
        table[group.rank] = tensors[0]
        bridge.wait(runtime.allreduce([table], [table], op_name, Sum, background=False))
        return [table]

    def forward(own: tf.Tensor) -> list[tf.Tensor]:
        shape = [None, *own.shape]
        return bridge.run(place, [own], [own.dtype], [shape], name, ignore_name_scope=True)

    def backward(gradient: tf.Tensor) -> list[tf.Tensor]:
        total = allreduce(gradient, op=Sum, name=f"{name}.grad", ignore_name_scope=True)
        return [tf.gather(total, own_rank())]

    return differentiable(forward, backward, [rows])[0]


def _combined(table: tf.Tensor) -> list[tf.Tensor]:
    """Mean and biased variance over all ranks."""
    counts, means, variances = tf.unstack(table, num=3, axis=1)
    weights = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, 0))
    mean = tf.reduce_sum(weights * means, 0)
    variances += tf.math.squared_difference(means, mean)
    return [mean, tf.reduce_sum(weights * variances, 0)]
