"""Gradient accumulation where code runs eagerly or in tf.functions; upstream's home of it."""

from __future__ import annotations

from horovod.tensorflow.gradient_aggregation import GradientAggregation


class LocalGradientAggregationHelperEager(GradientAggregation):
    """The helper of Keras optimizers outside of v1 graphs."""
