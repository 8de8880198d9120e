"""Classes to build data loaders from: `BaseDataLoader` and `AsyncDataLoaderMixin`.

The loaders of `horovod.spark.data_loaders` are built from them.
"""

from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
