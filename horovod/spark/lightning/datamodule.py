"""Load batches for Lightning from Parquet, as dicts of the columns."""

from __future__ import annotations

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
        self._train_ahead = train_async_data_loader_queue_size
        self._val_ahead = val_async_data_loader_queue_size

    def _edited(self, batch: Rows) -> Rows:
        return {
            name: array.astype(np.float32) if array.dtype == np.float64 else array
            for name, array in super()._edited(batch).items()
        }

    def train_dataloader(self) -> Any:
        endless = self.train_batches()
        steps, ends_early = self.steps_per_epoch_train, self._passes is not None
        return self._loader(steps, lambda: endless, self._train_ahead, self._debug, ends_early)

    def val_dataloader(self) -> Any:
        steps = self.steps_per_epoch_val
        # Equally many batches on every rank, because modules may reduce in each step.
        return self._loader(steps, self.equal_val_batches, self._val_ahead, self._debug)
