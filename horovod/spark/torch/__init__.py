"""PyTorch models trained from Spark DataFrames: `TorchEstimator` and `TorchModel`.

Both are imported when they are first used: the ranks of a training import their part of this
package, and do without pyspark and pandas, which take 60 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]


def __getattr__(name: str) -> Any:
    """Import the estimator and its model only when they are asked for."""
    if name in __all__:
        from horovod.spark.torch import estimator

        return getattr(estimator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
