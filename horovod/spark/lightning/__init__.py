"""Lightning modules trained from Spark DataFrames: `TorchEstimator` and `TorchModel`."""

from horovod.spark.lightning.estimator import TorchEstimator, TorchModel

LightningEstimator = TorchEstimator

__all__ = ["LightningEstimator", "TorchEstimator", "TorchModel"]
