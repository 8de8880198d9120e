"""How a rank's share of several tensors, taken end to end, is cut into blocks to be reduced.

A block is so small that everybody's fit into the second-level cache. Where tensors are small it
covers several of them, each with one *span* of memory, and the kernel moves all spans of a block in
one call. What is known of a list of tensors from their sizes alone is kept in a `Layout`, so that a
training step only fills in the addresses. Used by the shared-memory transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_LARGEST_BLOCK = 256 * 1024
_IN_CACHE = 1024 * 1024  # what the blocks of all ranks together may take of the cache
SPAN = 16  # bytes of the kernel's struct iovec: address and length
_MOST_SPANS = 1024  # that one call takes


class Block(NamedTuple):
    """Elements to be reduced together."""

    first: int  # number of its first span
    spans: int
    elements: int
    tensor: int  # of the first span, and the element of it with which the span begins
    start: int


class Layout:
    """The blocks of one rank, and the places of their spans on every rank."""

    def __init__(self, counts: Sequence[int], width: int, rank: int, size: int) -> None:
        self.blocks: list[Block] = []
        spans: list[tuple[int, int, int]] = []  # tensor, first element, number of elements
        lo, hi = share(sum(counts), width, rank, size)
        begin = taken = 0  # of the block that is being filled: its first span, its elements so far
        most = block_bytes(size) // width
        for tensor, start, count in pieces(counts, lo, hi):
            while count:
                part = min(count, most - taken)
                spans.append((tensor, start, part))
                taken, start, count = taken + part, start + part, count - part
                if taken == most or len(spans) - begin == _MOST_SPANS:
                    self.blocks.append(Block(begin, len(spans) - begin, taken, *spans[begin][:2]))
                    begin, taken = len(spans), 0
        if taken:
            self.blocks.append(Block(begin, len(spans) - begin, taken, *spans[begin][:2]))
        described = np.array(spans, dtype=np.uint64).reshape(-1, 3)
        self._tensor = described[:, 0].astype(np.intp)
        self._offset = described[:, 1] * np.uint64(width)
        self._table = np.empty((size, len(spans), 2), dtype=np.uint64)
        self._table[:, :, 1] = described[:, 2] * np.uint64(width)
        self.tables = [self._table[other].ctypes.data for other in range(size)]
        self.lengths: list[int] = self._table[0, :, 1].tolist()

    def place(self, rank: int, pointers: np.ndarray[Any, Any]) -> None:
        """Fill in where `rank` has the tensors. `tables[rank]` is then its array of iovecs."""
        np.add(pointers[self._tensor], self._offset, out=self._table[rank, :, 0])

    def addresses(self, rank: int) -> list[int]:
        """Where the spans are on `rank`, after `place`."""
        found: list[int] = self._table[rank, :, 0].tolist()
        return found


def block_bytes(size: int) -> int:
    """How much is reduced at a time among `size` ranks."""
    return min(_LARGEST_BLOCK, max(_IN_CACHE // size // 4096 * 4096, 16 * 1024))


def share(count: int, width: int, rank: int, size: int) -> tuple[int, int]:
    """Rank's share of `count` elements of `width` bytes, cut at cache lines."""
    line = max(1, 64 // width)
    each = -(-count // (size * line)) * line
    return min(count, rank * each), min(count, (rank + 1) * each)


def pieces(counts: Sequence[int], lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """What elements `lo` to `hi` of all tensors are in each of them."""
    begin = 0
    for tensor, count in enumerate(counts):
        first, last = max(lo, begin), min(hi, begin + count)
        if first < last:
            yield tensor, first - begin, last - first
        begin += count
