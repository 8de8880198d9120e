"""Constants that programs for Horovod 0.28.1 import from here."""

from __future__ import annotations

from horovod.spark.common.metadata import ARRAY, CUSTOM_SPARSE, NOCHANGE

__all__ = [
    "ARRAY",
    "CUSTOM_SPARSE",
    "DENSE_VECTOR",
    "METRIC_PRINT_FREQUENCY",
    "MIXED_SPARSE_DENSE_VECTOR",
    "NOCHANGE",
    "ONE_GB",
    "PETASTORM_HDFS_DRIVER",
    "SPARSE_VECTOR",
    "TOTAL_BUFFER_MEMORY_CAP",
]

PETASTORM_HDFS_DRIVER = "libhdfs"
METRIC_PRINT_FREQUENCY = 1000
MIXED_SPARSE_DENSE_VECTOR = "mixed_sparse_dense_vector"
SPARSE_VECTOR = "sparse_vector"
DENSE_VECTOR = "dense_vector"
TOTAL_BUFFER_MEMORY_CAP = 4  # GB
ONE_GB = 1 << 30
