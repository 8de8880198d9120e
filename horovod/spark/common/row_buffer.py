"""Rows waiting to be drawn at random or in order: the bounded memory of a reading rank.

Columns of the same type and row shape lie side by side in one array, because moving a row of one
wide array costs much less than moving a hundred values of a hundred arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.spark.common.columns import ColumnError, Rows

Array = np.ndarray[Any, Any]

_TILE = 256  # rows: a tile of a hundred columns stays in the cache while it is transposed


class RowLayout:
    """Which columns share an array."""

    def __init__(self, rows: Rows) -> None:
        self.kinds = {name: (array.dtype, array.shape[1:]) for name, array in rows.items()}
        blocks: dict[Any, list[str]] = {}
        for name, kind in self.kinds.items():
            blocks.setdefault(kind, []).append(name)
        self.blocks = list(blocks.values())

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

    def fill(self, arrays: list[Array], places: Array, rows: Rows) -> None:
        """Copy rows into the arrays, each to its place."""
        self.check(rows)
        for names, array in zip(self.blocks, arrays, strict=True):
            if len(names) == 1:
                array[places, 0] = rows[names[0]]
                continue
            stacked = np.stack([rows[name] for name in names])
            scratch = np.empty((_TILE, *array.shape[1:]), array.dtype)
            for first in range(0, len(places), _TILE):
                tile = np.moveaxis(stacked[:, first : first + _TILE], 0, 1)
                turned = scratch[: len(tile)]
                np.copyto(turned, tile)
                array[places[first : first + _TILE]] = turned

    def columns(self, arrays: list[Array]) -> Rows:
        """Each column as a view into the arrays, in the order in which they were read."""
        found = {
            name: array[:, place]
            for names, array in zip(self.blocks, arrays, strict=True)
            for place, name in enumerate(names)
        }
        return {name: found[name] for name in self.kinds}


class RowBuffer:
    """Rows in no particular order: `add` puts rows in, `draw` takes some out at random.

    A row stays where it was put until it is drawn; what is shuffled are the places.
    """

    def __init__(self, layout: RowLayout, capacity: int) -> None:
        self._layout = layout
        self._arrays = layout.empty(capacity)
        self._used = np.empty(capacity, np.int64)  # places of the rows, the first `size` of these
        self._free = np.arange(capacity)[::-1].copy()  # the other places, the last one first
        self.size = 0

    def add(self, rows: Rows) -> None:
        count = row_count(rows)
        room = len(self._used)
        if self.size + count > room:
            self._grow(self.size + count)
            room = len(self._used)
        free = room - self.size
        places = self._free[free - count : free][::-1].copy()
        self._layout.fill(self._arrays, places, rows)
        self._used[self.size : self.size + count] = places
        self.size += count

    def _grow(self, room: int) -> None:
        before = len(self._used)
        larger = self._layout.empty(room)
        for old, new in zip(self._arrays, larger, strict=True):
            new[:before] = old
        self._arrays = larger
        self._used = np.concatenate([self._used, np.empty(room - before, np.int64)])
        free = self._free[: before - self.size]
        self._free = np.concatenate([np.arange(before, room)[::-1], free, np.empty(self.size, int)])

    def draw(self, count: int, random: np.random.Generator) -> list[Array]:
        """Take `count` rows out, chosen at random."""
        count = min(count, self.size)
        chosen = random.choice(self.size, count, replace=False)
        places = self._used[chosen]
        left = self.size - count
        stay = np.ones(count, bool)
        stay[chosen[chosen >= left] - left] = False
        self._used[chosen[chosen < left]] = self._used[left : self.size][stay]
        free = len(self._used) - self.size
        self._free[free : free + count] = places
        self.size = left
        return [array.take(places, axis=0) for array in self._arrays]


class RowQueue:
    """Rows in the order in which they came."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._parts: list[list[Array]] = []
        self._start = 0
        self.size = 0

    def add(self, rows: Rows) -> None:
        count = row_count(rows)
        arrays = self._layout.empty(count)
        self._layout.fill(arrays, np.arange(count), rows)
        if count:
            self._parts.append(arrays)
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
    """The rows of several draws, one after the other."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return layout.empty(0)
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


def row_count(rows: Rows) -> int:
    return len(next(iter(rows.values()))) if rows else 0
