"""Read batches of torch tensors from Parquet, as dicts of the columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.spark.common.datamodule import ParquetDataModule
from horovod.spark.common.reading.columns import Rows
from horovod.spark.torch.feeding import Batch

BATCHES_AHEAD = 8  # batches that wait for the training loop, if they take at most these bytes
BYTES_AHEAD = 2 * 1024 * 1024


def tensors(rows: Rows) -> Batch:
    """Return the columns as tensors, which share the memory of the rows."""
    return {name: as_tensor(array) for name, array in rows.items()}


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a column as a tensor of a type that torch can compute with."""
    if array.dtype in (np.uint16, np.uint32, np.uint64):  # torch can hardly compute with these
        array = array.astype(np.int64)
    if not array.flags.writeable:  # a view of what pyarrow read
        array = array.copy()
    return torch.from_numpy(array)


class _GroupLoader(BaseDataLoader):
    """Lists of batches of a source, together `steps` batches each time it is iterated over."""

    def __init__(
        self, ahead: int, steps: int, source: Callable[[], Iterator[Rows]], ends_early: bool
    ) -> None:
        self._ends_early = ends_early  # whether too few batches are an error: others would wait
        self._ahead = max(1, ahead)
        self._steps = steps
        self._source = source
        super().__init__()

    def __len__(self) -> int:
        return self._steps

    def _iterate(self) -> Iterator[list[Batch]]:
        done = 0
        source = itertools.islice(self._source(), self._steps)
        for rows in source:
            size = max(1, sum(array.nbytes for array in rows.values()))
            more = min(self._ahead, max(1, BYTES_AHEAD // size)) - 1
            group = [tensors(rows), *map(tensors, itertools.islice(source, more))]
            done += len(group)
            yield group
        if self._ends_early and done < self._steps:
            raise RuntimeError(
                f"the data ended after {done} of {self._steps} batches of this epoch: leave "
                "loader_num_epochs out, or make it as many as epochs"
            )


class AsyncLoader(AsyncDataLoaderMixin, _GroupLoader):
    """Batches of a source, read ahead by a thread.

    The thread hands over several batches at once: each time it does costs a switch between threads,
    and Python's lock, for which the training loop would wait.

    Args:
        ahead: Number of batches to read ahead, fewer if they are large; 0 uses no thread.
        debug: Whether to log when the training loop waits for data.
        steps: Number of batches of an epoch.
        source: Function that returns the iterator over batches for one epoch.
        ends_early: Whether it is an error if there are fewer batches.
    """

    def __init__(
        self,
        ahead: int,
        debug: bool,
        steps: int,
        source: Callable[[], Iterator[Rows]],
        ends_early: bool = False,
    ) -> None:
        super().__init__(min(1, ahead), debug, ahead, steps, source, ends_early)

    def __iter__(self) -> Iterator[Batch]:
        for group in super().__iter__():
            group.reverse()
            while group:  # batches are dropped one by one, so that memory is freed early
                yield group.pop()


class PetastormDataModule(ParquetDataModule):
    """The default data module: named as upstream names it, without Petastorm behind it."""

    short_name = "petastorm"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loaders: list[AsyncLoader] = []

    def train_data(self) -> AsyncLoader:
        endless = self.train_batches()
        return self._loader(self.steps_per_epoch_train, lambda: endless)

    def val_data(self) -> AsyncLoader:
        return self._loader(self.steps_per_epoch_val, self.val_batches)

    def _loader(
        self,
        steps: int,
        source: Callable[[], Iterator[Rows]],
        ahead: int | None = None,
        debug: bool = False,
        ends_early: bool = False,
    ) -> AsyncLoader:
        """Make a loader, which is closed with the data module."""
        ahead = BATCHES_AHEAD if ahead is None else ahead
        loader = AsyncLoader(ahead, debug, steps, source, ends_early)
        self._loaders.append(loader)
        return loader

    def __exit__(self, *error: object) -> None:
        for loader in self._loaders:
            loader.close_async_loader()
        super().__exit__(*error)


class NVTabularDataModule(PetastormDataModule):
    """Columns for tabular models: `continuous_cols` as float32, `categorical_cols` as int64.

    Upstream reads these with NVTabular, which is no longer developed; this class uses the reader of
    all other data modules.
    """

    short_name = "nvtabular"

    def __init__(
        self,
        *args: Any,
        continuous_cols: Sequence[str] | None = None,
        categorical_cols: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._kinds: dict[str, Any] = {name: np.float32 for name in continuous_cols or ()}
        self._kinds.update({name: np.int64 for name in categorical_cols or ()})

    def _edited(self, batch: Rows) -> Rows:
        batch = super()._edited(batch)
        for name, kind in self._kinds.items():
            batch[name] = batch[name].astype(kind, copy=False)
        return batch
