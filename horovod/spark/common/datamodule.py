"""Data modules, which give a rank its batches: their interface, and the one that reads Parquet."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from horovod.spark.common.reading.batches import batches, in_memory, read_all, rows_that_fit
from horovod.spark.common.reading.columns import ColumnError, Rows
from horovod.spark.common.reading.reader import ParquetReader


class DataModule(ABC):
    """Training and validation data of one rank; a context manager that opens and closes them."""

    short_name: str | None = None

    def __init__(
        self,
        train_dir: str,
        val_dir: str,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        transform_fn: Callable[[Any], Any] | None = None,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        steps_per_epoch_train: int = 1,
        steps_per_epoch_val: int = 1,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        self.train_dir = train_dir
        self.val_dir = val_dir
        self.num_train_epochs = num_train_epochs
        self.has_val = has_val
        self.train_batch_size = train_batch_size
        self.val_batch_size = val_batch_size
        self.shuffle = shuffle
        self.transform_fn = transform_fn
        self.inmemory_cache_all = inmemory_cache_all
        self.cur_shard = cur_shard
        self.shard_count = shard_count
        self.schema_fields = schema_fields
        self.storage_options = storage_options
        self.steps_per_epoch_train = steps_per_epoch_train
        self.steps_per_epoch_val = steps_per_epoch_val
        self.verbose = verbose

    def __enter__(self) -> DataModule:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abstractmethod
    def train_data(self) -> Any:
        """Return the iterable of training batches, which is iterated over once in each epoch."""

    @abstractmethod
    def val_data(self) -> Any:
        """Return the iterable of validation batches, which is iterated over once in each epoch."""


class ParquetDataModule(DataModule):
    """Reads Parquet; subclasses bring batches into the form that a framework takes.

    Training goes through the shard again and again: every epoch has exactly
    `steps_per_epoch_train` full batches on every rank. Validation takes each row of the shard
    once, so the last batch may be smaller, unless other steps were asked for.
    """

    def __init__(
        self,
        *args: Any,
        shuffle_capacity: int | None = 0,
        seed: int | None = None,
        loader_num_epochs: int | None = None,
        train_reader_workers: int = 2,
        val_reader_workers: int = 2,
        edit_fields: Sequence[Any] | None = None,
        removed_fields: Sequence[str] | None = None,
        refuse_nan_in: Sequence[str] = (),
        disk_cache: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._capacity = shuffle_capacity if self.shuffle else 0
        self._seed = None if seed is None else seed + self.cur_shard  # another one on each rank
        self._passes = loader_num_epochs
        self._workers = {"train": train_reader_workers, "val": val_reader_workers}
        self._edit_fields = edit_fields
        self._removed = list(removed_fields or ())
        self._refuse_nan_in = refuse_nan_in
        self._disk_cache = disk_cache and self.num_train_epochs > 1
        self._train: ParquetReader | None = None
        self._val: ParquetReader | None = None

    def __enter__(self) -> ParquetDataModule:
        self._train = self._reader(self.train_dir, "train")
        if self.has_val:
            self._val = self._reader(self.val_dir, "val")
        return self

    def __exit__(self, *_: object) -> None:
        for reader in (self._train, self._val):
            if reader is not None:
                reader.stop()
        self._train = self._val = None

    def _reader(self, url: str, what: str) -> ParquetReader:
        return ParquetReader(
            url,
            schema_fields=self.schema_fields,
            cur_shard=self.cur_shard,
            shard_count=self.shard_count,
            num_epochs=self._passes_of(what),
            shuffle_row_groups=what == "train" and self.shuffle,
            seed=self._seed,
            transform_fn=self.transform_fn,
            removed_fields=self._removed,
            workers_count=self._workers[what],
            storage_options=self.storage_options,
            refuse_nan_in=self._refuse_nan_in,
            disk_cache=self._disk_cache and self._passes_of(what) != 1,
        )

    def _passes_of(self, what: str) -> int | None:
        if what == "val":
            return None  # each validation takes one, and the next one is read ahead
        return 1 if self.inmemory_cache_all else self._passes

    def train_batches(self) -> Iterator[Rows]:
        """Yield full batches without end."""
        assert self._train is not None, "use the data module in a `with` block"
        size, seed = self.train_batch_size, self._seed
        if self.inmemory_cache_all:
            rows = read_all(self._train)
            found = in_memory(rows, size, shuffle=self.shuffle, seed=seed)
        else:
            found = batches(self._train.passes(), size, capacity=self._rows_to_shuffle, seed=seed)
        yield from map(self._edited, found)

    def _rows_to_shuffle(self, row_bytes: int) -> int:
        """Return the number of rows of this size among which training shuffles."""
        assert self._train is not None
        wanted = rows_that_fit(row_bytes) if self._capacity is None else self._capacity
        return min(wanted, self._train.num_rows)

    def val_batches(self) -> Iterator[Rows]:
        """Yield the batches of one validation."""
        assert self._val is not None, "there is no validation data"
        most_rows = -(-self._val.files.num_rows // self.shard_count)  # shards differ by one
        done = 0
        while done < self.steps_per_epoch_val:
            one_pass = itertools.islice(self._val.passes(), 1)
            for batch in batches(one_pass, self.val_batch_size):
                if done == self.steps_per_epoch_val:
                    return
                yield self._edited(batch)
                done += 1
            if self.steps_per_epoch_val <= -(-most_rows // self.val_batch_size):
                return  # all rows of this rank have been seen; another may have one more

    def equal_val_batches(self) -> Iterator[Rows]:
        """Yield exactly `steps_per_epoch_val` batches: a rank with one batch less begins again."""
        validations = (self.val_batches() for _ in itertools.count())
        return itertools.islice(
            itertools.chain.from_iterable(validations), self.steps_per_epoch_val
        )

    def _edited(self, batch: Rows) -> Rows:
        """Give columns the types and shapes that `transformation_edit_fields` names."""
        for field in self._edit_fields or ():
            name, kind, shape = field[0], field[1], tuple(field[2] or ())
            if name in batch:
                try:
                    batch[name] = batch[name].astype(kind, copy=False).reshape(-1, *shape)
                except (TypeError, ValueError) as error:
                    raise ColumnError(
                        f"transformation_edit_fields: column {name!r} does not become {kind} of "
                        f"shape {shape}: {error}"
                    ) from None
        return batch
