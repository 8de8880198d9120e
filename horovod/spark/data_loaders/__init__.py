"""Loaders of torch tensors over a `ParquetReader`, for training loops of your own.

from horovod.spark.common.reading.reader import ParquetReader
from horovod.spark.data_loaders.pytorch_data_loaders import PytorchAsyncDataLoader
"""
