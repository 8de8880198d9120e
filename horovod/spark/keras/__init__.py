"""Keras models trained from Spark DataFrames: `KerasEstimator` and `KerasModel`.

Models may be of Keras 3, on any of its backends, and of tf-keras.
"""

from horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
