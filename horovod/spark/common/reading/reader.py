"""Read the share of one rank from Parquet, decoded ahead in the background.

The rows of a dataset, in the order of its files and row groups, are cut into `shard_count` ranges
whose lengths differ by one row at most, so ranks get equal shares whatever the row groups are.
Worker threads decode row groups piece by piece; the amount that waits to be consumed is bounded.
They go on with the next pass while this one is consumed, but never beyond `num_epochs`. They may
keep decoded rows on the local disk for later passes.
"""

from __future__ import annotations

import collections
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from horovod.spark.common.reading.columns import ColumnError, Rows, check_nan, rows_of, to_numpy
from horovod.spark.common.reading.parquet_files import ParquetFiles, Piece
from horovod.spark.common.reading.piece_file import PieceFile, local_folder
from horovod.spark.common.reading.row_buffer import packed

__all__ = ["ParquetReader"]

# Bytes of decoded rows that travel from a worker to the consumer. Memory of this size is reused;
# larger blocks go back to the system, and every page of the next block costs a fault: decoding
# 32 MiB at once took twice the processor time.
CHUNK_BYTES = 512 * 1024
CHUNKS_AHEAD = 1  # chunks that each worker may have ready


class ParquetReader:
    """Iterates over dicts of arrays, one dict for each chunk of rows, column by column.

    Close it with `stop`, or use it in a `with` block. It has what the loaders of
    `horovod.spark.data_loaders` use of a reader: `num_epochs`, `batched_output`,
    `last_row_consumed`, `reset`, `stop`, `join`, and the number of rows.

    Args:
        url: Path or URL of the Parquet data: a file, or a folder of files.
        schema_fields: Names of the columns to read. By default all.
        cur_shard: Which share of the rows to read; a rank gives its rank. The default is 0.
        shard_count: Number of shares, which is the number of ranks. The default is 1.
        num_epochs: Number of passes over the share, or None for passes without end. The default
            is 1.
        shuffle_row_groups: Whether each pass reads the row groups in another order. By default
            they come in the order of the files.
        seed: Seed of these orders. By default they differ from run to run.
        transform_fn: Function that gets a pandas DataFrame of some rows and returns another. By
            default rows stay what they are.
        removed_fields: Names of columns to leave out of the result. By default none.
        workers_count: Number of threads that decode. The default is 2.
        storage_options: Options of fsspec's file system for the URL. By default none.
        refuse_nan_in: Names of columns in which a NaN is an error. By default none.
        disk_cache: Whether to keep decoded rows on the local disk for later passes, unless
            `transform_fn` is given, which may make other rows in each. The default is False.

    Raises:
        ColumnError: A column is not in the data, or no model can be fed with it.
        FileNotFoundError: There is no Parquet data at `url`.
        ValueError: A number is out of range, or there are fewer rows than shares.
    """

    batched_output = True

    def __init__(
        self,
        url: str,
        *,
        schema_fields: Sequence[str] | None = None,
        cur_shard: int = 0,
        shard_count: int = 1,
        num_epochs: int | None = 1,
        shuffle_row_groups: bool = False,
        seed: int | None = None,
        transform_fn: Callable[[Any], Any] | None = None,
        removed_fields: Sequence[str] = (),
        workers_count: int = 2,
        storage_options: dict[str, Any] | None = None,
        refuse_nan_in: Sequence[str] = (),
        disk_cache: bool = False,
    ) -> None:
        if not 0 <= cur_shard < shard_count:
            raise ValueError(f"cur_shard must be from 0 to {shard_count - 1}, not {cur_shard}")
        if num_epochs is not None and num_epochs < 1:
            raise ValueError(f"num_epochs must be at least 1, or None for ever, not {num_epochs}")
        if workers_count < 1:
            raise ValueError(f"a reader needs at least one worker, not {workers_count}")
        self.files = ParquetFiles(url, storage_options)
        self.columns = list(schema_fields or self.files.names)
        self.files.check_columns(self.columns)
        if self.files.num_rows < shard_count:
            raise ValueError(
                f"the data at {url} has {self.files.num_rows} row(s) for {shard_count} ranks: "
                "each needs at least one"
            )
        self.num_epochs = num_epochs
        self.url = url
        self._pieces = self.files.shard(cur_shard, shard_count)
        self.num_rows = sum(piece.stop - piece.start for piece in self._pieces)
        self._shuffle = shuffle_row_groups
        self._seed = seed
        self._transform = transform_fn
        self._removed = list(removed_fields)
        self._refuse_nan_in = list(refuse_nan_in)
        self._workers_count = workers_count
        self._kept: PieceFile | None = None
        if disk_cache and transform_fn is None:
            self._kept = PieceFile(local_folder(cur_shard))
        self._chunk_rows = min(65536, max(16, CHUNK_BYTES // self.files.bytes_per_row))
        self._run: _Run | None = None
        self._in_pass = False
        self._passes = 0  # passes that have begun; each has an order of its own
        self._passes_in_run = 0  # passes that have finished
        self.last_row_consumed = False

    def passes(self) -> Iterator[Iterator[Rows]]:
        """Yield every pass over the shard, as an iterator over its chunks."""
        for _ in self._pass_numbers():
            yield self._chunks()

    def _pass_numbers(self) -> Iterable[int]:
        return itertools.count() if self.num_epochs is None else range(self.num_epochs)

    def __iter__(self) -> Iterator[Rows]:
        self.last_row_consumed = False
        for chunks in self.passes():
            yield from chunks
        self.last_row_consumed = True

    def _chunks(self) -> Iterator[Rows]:
        if self._in_pass:  # the consumer has left the last pass before its end
            self.stop()
        self._in_pass = True
        if self._run is None:
            self._run = _Run(self._orders(), self._read, self._workers_count)
            self._passes_in_run = 0
        yield from self._run.next_pass(len(self._pieces))
        self._in_pass = False
        self._passes_in_run += 1
        if self._passes_in_run == self.num_epochs:
            self.stop()  # nothing is left to read; another iteration begins anew

    def _orders(self) -> Iterator[Piece]:
        """Yield the pieces of all passes, each pass in its order."""
        seed = np.random.SeedSequence(self._seed).generate_state(1)[0]
        for _ in self._pass_numbers():
            order = np.arange(len(self._pieces))
            if self._shuffle:
                order = np.random.default_rng([int(seed), self._passes]).permutation(order)
            self._passes += 1
            yield from (self._pieces[index] for index in order)

    def _read(self, piece: Piece) -> Iterator[Rows]:
        """Yield the rows of a piece, packed."""
        if self._kept is None:
            return map(packed, self._decode(piece))
        return self._kept.chunks(piece, lambda piece: map(packed, self._decode(piece)))

    def _decode(self, piece: Piece) -> Iterator[Rows]:
        for batch in self.files.read(piece, self.columns, self._chunk_rows):
            if self._transform is None:
                rows = {n: a for n, a in rows_of(batch).items() if n not in self._removed}
            else:
                rows = _transformed(batch, self._transform, self._removed)
            for name in self._refuse_nan_in:
                if name in rows:
                    check_nan(name, rows[name])
            yield rows

    def reset(self) -> None:
        """Begin again, as a new iteration does by itself."""
        self.stop()
        self.last_row_consumed = False

    def stop(self) -> None:
        """End the workers."""
        run, self._run = self._run, None
        self._in_pass = False
        if run is not None:
            run.stop()

    def join(self) -> None:
        """Wait until the workers have ended, which `stop` has done already."""

    def __enter__(self) -> ParquetReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        if getattr(self, "_run", None) is not None:
            self.stop()


class _End:
    """Marks the end of a piece, behind its last chunk."""


class _Output:
    """The output of one worker: chunks, the ends of pieces, and an error if it fails."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.room = threading.Semaphore(CHUNKS_AHEAD)  # free slots for chunks and ends


class _Run:
    """Worker threads, each with an output of its own; pieces are dealt out in turn.

    The consumer takes the pieces in the order in which they were dealt, so that the order of rows
    does not depend on which thread is faster.
    """

    def __init__(
        self, pieces: Iterator[Piece], read: Callable[[Piece], Iterator[Rows]], workers: int
    ) -> None:
        self._pieces = pieces
        self._read = read
        self._stopped = threading.Event()
        self._dealt: collections.deque[_Output] = collections.deque()
        self._ready = threading.Condition()
        self._outputs = [_Output() for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(mine,), name="horovod-reader", daemon=True)
            for mine in self._outputs
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, mine: _Output) -> None:
        while not self._stopped.is_set():
            with self._ready:
                piece = next(self._pieces, None)
                if piece is None:
                    return
                self._dealt.append(mine)
                self._ready.notify()
            try:
                for rows in self._read(piece):
                    mine.room.acquire()
                    if self._stopped.is_set():
                        return
                    mine.items.put(rows)
                    del rows  # frees their memory before more rows are decoded
                mine.room.acquire()  # the chunk was taken: another piece may be decoded
                mine.items.put(_End)
            except BaseException as error:
                mine.items.put(error)
                return

    def next_pass(self, pieces: int) -> Iterator[Rows]:
        for _ in range(pieces):
            with self._ready:
                while not self._dealt:
                    self._ready.wait()
                source = self._dealt.popleft()
            while True:
                item = source.items.get()
                source.room.release()
                if item is _End:
                    break
                if isinstance(item, BaseException):
                    self.stop()
                    raise item
                yield item
                del item  # frees its memory before the wait for another

    def stop(self) -> None:
        self._stopped.set()
        for output in self._outputs:
            output.room.release()  # its worker may wait for it
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def _transformed(batch: Any, transform: Callable[[Any], Any], removed: list[str]) -> Rows:
    """Have `transformation_fn`, from one pandas DataFrame to another, transform the rows."""
    frame = transform(batch.to_pandas())
    rows: Rows = {}
    for name in frame.columns:
        if name not in removed:
            rows[str(name)] = _series(str(name), frame[name])
    return rows


def _series(name: str, series: Any) -> np.ndarray[Any, Any]:
    import pyarrow as pa

    values = series.to_numpy()
    if values.dtype.kind in "biuf":
        return np.asarray(values)
    if len(values) and isinstance(values[0], np.ndarray) and values[0].dtype.kind in "biuf":
        try:
            return np.stack(values)
        except ValueError:
            raise ColumnError(
                f"column {name!r} has rows of different shapes after transformation_fn"
            ) from None
    return to_numpy(name, pa.array(series, from_pandas=True))
