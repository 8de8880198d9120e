"""Loaders for Lightning from Parquet: batches are dicts of the columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from horovod.spark.common.reading.columns import Rows
from horovod.spark.torch import datamodule as torch_datamodule


class PetastormDataModule(torch_datamodule.PetastormDataModule):
    """The default data module: named as upstream names it, without Petastorm behind it.

    It has the methods of a LightningDataModule that the estimator calls. Doubles, which Spark's
    vectors are made of, become float32, as the parameters of modules are.
    """

    def __init__(
        self,
        *args: Any,
        debug_data_loader: bool = False,
        train_async_data_loader_queue_size: int | None = None,
        val_async_data_loader_queue_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._debug = debug_data_loader
        self._queue_sizes = (train_async_data_loader_queue_size, val_async_data_loader_queue_size)

    def _edited(self, batch: Rows) -> Rows:
        return {
            name: array.astype(np.float32) if array.dtype == np.float64 else array
            for name, array in super()._edited(batch).items()
        }

    def train_dataloader(self) -> Any:
        endless = self.train_batches()
        limited = self._passes is not None
        size = self._queue_sizes[0]
        return self._async(self.steps_per_epoch_train, lambda: endless, size, limited)

    def val_dataloader(self) -> Any:
        return self._async(self.steps_per_epoch_val, self._equal_steps, self._queue_sizes[1])

    def _equal_steps(self) -> Iterator[Rows]:
        """As many batches on every rank, because modules may reduce in each step."""
        while True:
            yield from itertools.islice(self.val_batches(), self.steps_per_epoch_val)

    def _async(self, steps: int, source: Any, queue_size: int | None, limited: bool = False) -> Any:
        size = torch_datamodule.BATCHES_AHEAD if queue_size is None else queue_size
        loader = torch_datamodule.AsyncLoader(size, self._debug, steps, source, limited)
        self._loaders.append(loader)
        return loader
