"""Data loaders of our own shape: `BaseDataLoader` and `AsyncDataLoaderMixin`.

The loaders of `horovod.spark.data_loaders` are built from them, and so may be yours.
"""

from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
