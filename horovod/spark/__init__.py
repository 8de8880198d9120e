"""Horovod on Spark: call a function on all ranks of a job whose processes are Spark tasks.

``run``, ``run_elastic`` and ``HorovodRunner`` are for functions; the estimators, which train from
DataFrames, are in ``horovod.spark.torch``, ``horovod.spark.keras`` and ``horovod.spark.lightning``.
"""

from __future__ import annotations

from horovod.spark.horovod_runner import HorovodRunner, log_to_driver
from horovod.spark.runner import run, run_elastic

__all__ = ["HorovodRunner", "log_to_driver", "run", "run_elastic"]
