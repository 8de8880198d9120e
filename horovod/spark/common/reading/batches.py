"""Cut the chunks of a reader into batches of one size, shuffled in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from horovod.spark.common.reading.columns import Rows
from horovod.spark.common.reading.row_buffer import (
    Array,
    RowBuffer,
    RowLayout,
    RowQueue,
    RowStorage,
    join,
    row_count,
)

BUFFER_BYTES = 24 * 1024 * 1024  # size of the rows among which a rank shuffles
# Of large rows, such as images, at least this number, if they fit in eight times these bytes.
BUFFER_ROWS = 1024

# A draw has a fixed cost, so several small batches are drawn at once: at most these numbers of
# rows (shuffled; in order, which need not be copied), and at most these bytes.
_DRAWN_SHUFFLED, _DRAWN_IN_ORDER = 4096, 1024
_DRAWN_BYTES = 2 * 1024 * 1024


def rows_that_fit(row_bytes: int) -> int:
    """Return the default number of rows of this size among which a rank shuffles."""
    row = max(1, row_bytes)
    return max(1, BUFFER_BYTES // row, min(BUFFER_ROWS, 8 * BUFFER_BYTES // row))


def batches(
    passes: Iterable[Iterator[Rows]],
    batch_size: int,
    *,
    capacity: int | Callable[[int], int] = 0,
    seed: int | None = None,
) -> Iterator[Rows]:
    """Yield batches of `batch_size` rows; only the very last one may be smaller.

    Rows are drawn at random from `capacity` rows (0 keeps the reader's order); it may be a function
    of the bytes of a row, which are known when the first rows have come. Each pass gives every row
    once: rows of the next pass come in only as those of this one go out, so that reading never
    stands still between passes and the memory stays the same.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    for layout, arrays in _blocks(passes, batch_size, capacity, np.random.default_rng(seed)):
        for start in range(0, len(arrays[0]), batch_size):
            yield layout.columns([array[start : start + batch_size] for array in arrays])


def _blocks(
    passes: Iterable[Iterator[Rows]],
    batch_size: int,
    wanted: int | Callable[[int], int],
    random: np.random.Generator,
) -> Iterator[tuple[RowLayout, list[Array]]]:
    """Yield blocks of several batches; the last block may be smaller, as may its last batch."""
    ending: RowBuffer | RowQueue | None = None  # holds the rows that are left of the last pass
    storage: RowStorage | None = None  # shared by the rows of two passes
    parts: list[list[Array]] = []  # draws for a block that one draw could not fill
    layout: RowLayout | None = None
    capacity = rows_in_block = lacking = 0

    for chunks in itertools.chain(passes, [iter(())]):  # an empty pass draws what is left
        filling: RowBuffer | RowQueue | None = None
        for rows in chunks:
            if not row_count(rows):
                continue
            if layout is None:
                layout = RowLayout(rows)
                capacity = wanted if isinstance(wanted, int) else wanted(layout.row_bytes)
                lacking = rows_in_block = _rows_at_once(batch_size, capacity, layout.row_bytes)
            if filling is None:
                if capacity and storage is None:
                    storage = RowStorage(layout, capacity + rows_in_block + row_count(rows))
                filling = RowQueue(layout) if storage is None else RowBuffer(storage)
            filling.add(rows)
            del rows  # its memory is free for the next chunk
            waiting = filling.size + (ending.size if ending else 0)
            while waiting >= capacity + lacking:
                source = ending if ending is not None and ending.size else filling
                parts.append(source.draw(lacking, random))
                taken = len(parts[-1][0])
                waiting -= taken
                lacking -= taken
                if not lacking:
                    yield layout, join(parts, layout)
                    parts, lacking = [], rows_in_block
        while ending is not None and ending.size:  # the pass is shorter than the buffer
            assert layout is not None
            parts.append(ending.draw(lacking, random))
            lacking -= len(parts[-1][0])
            if not lacking:
                yield layout, join(parts, layout)
                parts, lacking = [], rows_in_block
        ending = filling
    if layout is not None and parts:
        yield layout, join(parts, layout)


def _rows_at_once(batch_size: int, capacity: int, row_bytes: int) -> int:
    """Return how many rows to draw at once: those of some whole batches."""
    most = min(capacity, _DRAWN_SHUFFLED) if capacity else _DRAWN_IN_ORDER
    most = min(most, _DRAWN_BYTES // max(1, row_bytes))
    return batch_size * max(1, most // batch_size)


def in_memory(rows: Rows, batch_size: int, *, shuffle: bool, seed: int | None) -> Iterator[Rows]:
    """Yield batches without end from rows in memory; each pass gives every row once."""
    random = np.random.default_rng(seed)
    layout = RowLayout(rows)
    arrays = layout.pack(rows)
    count = row_count(rows)
    left = np.arange(0)
    while True:
        while len(left) < batch_size:
            order = random.permutation(count) if shuffle else np.arange(count)
            left = np.concatenate([left, order])
        chosen, left = left[:batch_size], left[batch_size:]
        yield layout.columns([array.take(chosen, axis=0) for array in arrays])


def read_all(chunks: Iterable[Rows]) -> Rows:
    """Read all rows of a pass into memory."""
    parts = [rows for rows in chunks if row_count(rows)]
    if not parts:
        return {}
    layout = RowLayout(parts[0])
    blocks = zip(*(layout.pack(rows) for rows in parts), strict=True)
    return layout.columns([np.concatenate(block) for block in blocks])
