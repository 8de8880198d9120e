"""Hold the rows of a reading rank in bounded memory until they are drawn, at random or in order.

Columns of the same type and row shape lie side by side in one array, because moving a row of one
wide array costs much less than moving a hundred values of a hundred arrays. The workers of a reader
pack columns in this way, in parallel; the consumer then moves whole rows only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.spark.common.reading.columns import ColumnError, Rows

Array = np.ndarray[Any, Any]

_TILE_BYTES = 1024 * 1024  # size of the rows that are packed at once: they stay in the cache
_TILE_ROWS = 1024  # at least, because packing has a cost for each column of a tile


class RowLayout:
    """The arrays into which rows are packed, and the columns that share each of them."""

    def __init__(self, rows: Rows) -> None:
        self.kinds = {name: (array.dtype, array.shape[1:]) for name, array in rows.items()}
        blocks: dict[Any, list[str]] = {}
        for name, kind in self.kinds.items():
            blocks.setdefault(kind, []).append(name)
        self.blocks = list(blocks.values())
        self.row_bytes = sum(array[:1].nbytes for array in rows.values())

    def check(self, rows: Rows) -> None:
        for name, (dtype, shape) in self.kinds.items():
            if name not in rows:
                raise ColumnError(f"column {name!r} is missing in a part of the data")
            found = rows[name]
            if found.shape[1:] != shape or found.dtype != dtype:
                raise ColumnError(
                    f"column {name!r} has rows of shape {shape} and {dtype}, and rows of shape "
                    f"{found.shape[1:]} and {found.dtype}: all rows must be alike"
                )

    def empty(self, rows: int) -> list[Array]:
        arrays = []
        for names in self.blocks:
            dtype, shape = self.kinds[names[0]]
            arrays.append(np.empty((rows, len(names), *shape), dtype))
        return arrays

    def pack(self, rows: Rows) -> list[Array]:
        """Return the rows as arrays of this layout, without copying packed columns."""
        self.check(rows)
        return [_side_by_side([rows[name] for name in names]) for names in self.blocks]

    def fill(self, arrays: list[Array], places: Array | slice, rows: Rows) -> None:
        """Copy rows into the arrays, to the indices in `places`."""
        for array, block in zip(arrays, self.pack(rows), strict=True):
            array[places] = block

    def columns(self, arrays: list[Array]) -> Rows:
        """Return each column as a view into the arrays, in the order in which they were read."""
        found = {
            name: array[:, index]
            for names, array in zip(self.blocks, arrays, strict=True)
            for index, name in enumerate(names)
        }
        return {name: found[name] for name in self.kinds}


def packed(rows: Rows) -> Rows:
    """Put the columns of the same kind side by side in one array, of which they become views.

    Few rows stay as they are: packing them later costs less than checking that they are packed.
    """
    if row_count(rows) < _TILE_ROWS:
        return rows
    layout = RowLayout(rows)
    return layout.columns(layout.pack(rows))


def _side_by_side(columns: list[Array]) -> Array:
    """Return columns of one kind as an array of shape (rows, columns, ...)."""
    first = columns[0]
    if len(columns) == 1:
        return first[:, np.newaxis]
    shape = (len(first), len(columns), *first.shape[1:])
    if _are_columns_of(first.base, shape, columns):
        assert first.base is not None
        return first.base
    array = np.empty(shape, first.dtype)
    tile = max(_TILE_ROWS, _TILE_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), tile):
        stop = start + tile
        np.stack([column[start:stop] for column in columns], axis=1, out=array[start:stop])
    return array


def _are_columns_of(array: Any, shape: tuple[int, ...], columns: list[Array]) -> bool:
    """Return whether these are all the columns of the array, in its order."""
    first = columns[0]
    if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != first.dtype:
        return False
    start, _ = array.__array_interface__["data"]
    step, strides = array.strides[1], (array.strides[0], *array.strides[2:])
    return all(
        column.base is array
        and column.__array_interface__["data"][0] == start + index * step
        and column.shape == first.shape
        and column.strides == strides
        for index, column in enumerate(columns)
    )


class RowStorage:
    """Memory for rows: `put` copies rows in and returns their indices, `take` frees these."""

    def __init__(self, layout: RowLayout, capacity: int) -> None:
        self._layout = layout
        self._arrays = layout.empty(capacity)
        self._free = np.arange(capacity)[::-1].copy()  # `_left` free indices; the last is used next
        self._left = capacity

    def put(self, rows: Rows) -> Array:
        """Copy rows in; return their indices."""
        count = row_count(rows)
        if count > self._left:
            self._grow(count - self._left)
        self._left -= count
        places = self._free[self._left : self._left + count][::-1].copy()
        self._layout.fill(self._arrays, places, rows)
        return places

    def take(self, places: Array) -> list[Array]:
        """Copy the rows at these indices out, and free the indices."""
        self._free[self._left : self._left + len(places)] = places
        self._left += len(places)
        return [array.take(places, axis=0) for array in self._arrays]

    def _grow(self, more: int) -> None:
        before = len(self._free)
        larger = self._layout.empty(before + more)
        for old, new in zip(self._arrays, larger, strict=True):
            new[:before] = old
        self._arrays = larger
        free = [np.arange(before, before + more)[::-1], self._free[: self._left]]
        self._left += more
        self._free = np.concatenate([*free, np.empty(before + more - self._left, np.int64)])


class RowBuffer:
    """Rows in no particular order: `add` puts rows in, `draw` takes some out at random.

    A row stays where it was put until it is drawn; only indices are shuffled. Buffers may share a
    storage: the rows of two passes then need the memory of one.
    """

    def __init__(self, storage: RowStorage) -> None:
        self._storage = storage
        self._used = np.empty(0, np.int64)  # its first `size` entries are indices of the rows
        self.size = 0

    def add(self, rows: Rows) -> None:
        places = self._storage.put(rows)
        needed = self.size + len(places)
        if needed > len(self._used):
            more = np.empty(max(needed, 2 * len(self._used)) - len(self._used), np.int64)
            self._used = np.concatenate([self._used, more])
        self._used[self.size : needed] = places
        self.size = needed

    def draw(self, count: int, random: np.random.Generator) -> list[Array]:
        """Take `count` rows out, chosen at random."""
        count = min(count, self.size)
        chosen = random.choice(self.size, count, replace=False)
        places = self._used[chosen]
        left = self.size - count
        stay = np.ones(count, bool)
        stay[chosen[chosen >= left] - left] = False
        self._used[chosen[chosen < left]] = self._used[left : self.size][stay]
        self.size = left
        return self._storage.take(places)


class _Writable:
    """The memory of an array that is marked as read-only; numpy keeps this, and so the array."""

    def __init__(self, array: Array) -> None:
        self._owner = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _kept(array: Array) -> Array:
    """Return the array in memory that nobody else changes, and that tensors may write to.

    Arrays that pyarrow has decoded are marked as read-only and do not change, so they are not
    copied. Others are copied, because the code that made them may use them again.
    """
    return array.copy() if array.flags.writeable else np.asarray(_Writable(array))


class RowQueue:
    """Rows in the order in which they came."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._parts: list[list[Array]] = []
        self._start = 0
        self.size = 0

    def add(self, rows: Rows) -> None:
        count = row_count(rows)
        if count:
            self._parts.append([_kept(array) for array in self._layout.pack(rows)])
        self.size += count

    def draw(self, count: int, random: np.random.Generator) -> list[Array]:
        taken: list[list[Array]] = []
        wanted = count = min(count, self.size)
        while wanted:
            part = self._parts[0]
            end = min(len(part[0]), self._start + wanted)
            taken.append([array[self._start : end] for array in part])
            wanted -= end - self._start
            self._start = end
            if end == len(part[0]):
                self._parts.pop(0)
                self._start = 0
        self.size -= count
        return join(taken, self._layout)


def join(parts: list[list[Array]], layout: RowLayout) -> list[Array]:
    """Join the rows of several draws, one after the other."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return layout.empty(0)
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


def row_count(rows: Rows) -> int:
    return len(next(iter(rows.values()))) if rows else 0
