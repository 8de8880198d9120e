"""Lightning modules trained from Spark DataFrames: `TorchEstimator` and `TorchModel`."""

from horovod.spark.lightning.estimator import TorchEstimator, TorchModel

LightningEstimator = TorchEstimator
"""Another name of `TorchEstimator`, for programs that also use the one of PyTorch."""

__all__ = ["LightningEstimator", "TorchEstimator", "TorchModel"]
