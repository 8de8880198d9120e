"""Upstream's path of the helper for gradient accumulation in eager code and tf.functions."""

from __future__ import annotations

from horovod.tensorflow.gradient_aggregation import GradientAggregation


class LocalGradientAggregationHelperEager(GradientAggregation):
    """The helper of upstream's Keras optimizers outside v1 graphs."""
