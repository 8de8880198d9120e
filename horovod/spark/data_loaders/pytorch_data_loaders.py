"""Loaders that yield batches of torch tensors, as dicts of the columns that a reader reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.spark.common.reading.batches import batches, in_memory, read_all
from horovod.spark.common.reading.columns import Rows
from horovod.spark.torch.datamodule import tensors
from horovod.spark.torch.feeding import Batch


def _passes(reader: Any) -> Iterator[Iterator[Rows]]:
    """Return the passes of a reader; one without the method `passes` is a single pass."""
    if hasattr(reader, "passes"):
        return iter(reader.passes())
    chunks = (dict(part._asdict() if hasattr(part, "_asdict") else part) for part in reader)
    return iter([chunks])


class PetastormBatchedDataLoader:
    """An iterable of batches of a reader's rows, shuffled among `shuffling_queue_capacity`."""

    def __init__(
        self,
        reader: Any,
        batch_size: int = 1,
        transform_fn: Callable[[Batch], Any] | None = None,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        self.reader = reader
        self.batch_size = batch_size
        self.transform_fn = transform_fn
        self.shuffling_queue_capacity = shuffling_queue_capacity

    def __iter__(self) -> Iterator[Any]:
        rows = getattr(self.reader, "num_rows", self.shuffling_queue_capacity)
        capacity = min(self.shuffling_queue_capacity, rows)
        for found in batches(_passes(self.reader), self.batch_size, capacity=capacity):
            batch = tensors(found)
            yield batch if self.transform_fn is None else self.transform_fn(batch)


class PytorchDataLoader(BaseDataLoader):
    """Batches of a reader's rows, as dicts of torch tensors.

    Args:
        reader: The `ParquetReader` to read from.
        batch_size: Number of rows of a batch.
        shuffling_queue_capacity: Number of rows to shuffle among; 0 keeps their order.
        name: Name of the loader in what it prints. By default empty.
        limit_step_per_epoch: Number of batches of an epoch. The default, -1, means all rows.
        verbose: Whether to print a line when an epoch begins. By default it does not.
    """

    def __init__(
        self,
        reader: Any,
        batch_size: int,
        shuffling_queue_capacity: int,
        name: str = "",
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.reader = reader
        self.batch_size = batch_size
        self.shuffling_queue_capacity = shuffling_queue_capacity
        self.name = name
        self.limit_step_per_epoch = limit_step_per_epoch
        self.verbose = verbose
        super().__init__()

    def __len__(self) -> int:
        """Return the number of batches of an epoch; 0 if the reader does not know its rows."""
        if self.limit_step_per_epoch != -1:
            return self.limit_step_per_epoch
        rows, epochs = getattr(self.reader, "num_rows", 0), self.reader.num_epochs
        return 0 if epochs is None else -(-rows * epochs // self.batch_size)

    def _source(self) -> Iterator[Any]:
        return iter(
            PetastormBatchedDataLoader(
                self.reader,
                self.batch_size,
                shuffling_queue_capacity=self.shuffling_queue_capacity,
            )
        )

    def _limited(self, source: Iterator[Any]) -> Iterator[Any]:
        if self.verbose:
            print(f"[{self.name}]: the epoch begins, of {len(self) or 'unknown'} batches")
        limit = self.limit_step_per_epoch
        yield from source if limit == -1 else itertools.islice(source, limit)

    def _iterate(self) -> Iterator[Any]:
        if getattr(self.reader, "last_row_consumed", False):
            self.reader.reset()
        yield from self._limited(self._source())


class PytorchAsyncDataLoader(AsyncDataLoaderMixin, PytorchDataLoader):
    """A `PytorchDataLoader` whose batches a thread loads ahead.

    Its arguments are those of `PytorchDataLoader`, by name, with `async_loader_queue_size`: how
    many batches may wait. Close it with `close_async_loader`.
    """


class PytorchInfiniteDataLoader(PytorchDataLoader):
    """Continues in each epoch where the last one ended; `num_epochs` of the reader must be None."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.reader.num_epochs is not None:
            raise ValueError(
                "a loader without end needs a reader with num_epochs=None, not "
                f"{self.reader.num_epochs}"
            )
        self._endless: Iterator[Any] | None = None

    def _iterate(self) -> Iterator[Any]:
        if self._endless is None:
            self._endless = self._source()
        yield from self._limited(self._endless)


class PytorchInfiniteAsyncDataLoader(AsyncDataLoaderMixin, PytorchInfiniteDataLoader):
    """A `PytorchInfiniteDataLoader` whose batches a thread loads ahead."""


class PytorchInmemDataLoader(PytorchDataLoader):
    """Reads all rows once and keeps them; needs `limit_step_per_epoch`."""

    def __init__(
        self,
        reader: Any,
        batch_size: int,
        num_epochs: int,
        name: str = "",
        shuffle: bool = False,
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if limit_step_per_epoch == -1:
            raise ValueError("limit_step_per_epoch is not set, which a loader in memory needs")
        super().__init__(reader, batch_size, 0, name, limit_step_per_epoch, verbose)
        self.num_epochs = num_epochs
        self._epochs_left = num_epochs
        rows = read_all(itertools.chain.from_iterable(itertools.islice(_passes(reader), 1)))
        reader.stop()
        self._kept = in_memory(rows, batch_size, shuffle=shuffle, seed=None)

    def _iterate(self) -> Iterator[Any]:
        if self.num_epochs is not None and self._epochs_left <= 0:
            return
        self._epochs_left -= 1
        yield from self._limited(map(tensors, self._kept))


class PytorchInmemAsyncDataLoader(AsyncDataLoaderMixin, PytorchInmemDataLoader):
    """A `PytorchInmemDataLoader` whose batches a thread loads ahead."""
