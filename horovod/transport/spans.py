"""How a rank's share of several tensors, taken end to end, is cut into blocks to be reduced.

A block is so small that everybody's fit into the second-level cache. Where tensors are small it
covers several of them, each with one *span* of memory, and the kernel moves all spans of a block in
one call. What is known of a list of tensors from their sizes alone is kept in a `Layout`, so that a
training step only fills in the addresses. Used by the shared-memory transport.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_LARGEST_BLOCK = 256 * 1024
_IN_CACHE = 1024 * 1024  # what the blocks of all ranks together may take of the cache
SPAN = 16  # bytes of the kernel's struct iovec: address and length
_MOST_SPANS = 1024  # that one call takes


class Block(NamedTuple):
    """Elements to be reduced together."""

    first: int  # number of its first span
    spans: int
    elements: int


class Span(NamedTuple):
    """Elements of a block that lie in one tensor."""

    tensor: int
    start: int
    elements: int


class Layout:
    """The blocks of one rank, and the places of their spans on every rank."""

    def __init__(self, counts: Sequence[int], width: int, rank: int, size: int) -> None:
        self.blocks: list[Block] = []
        self.spans: list[Span] = []
        spans = self.spans
        lo, hi = share(sum(counts), width, rank, size)
        begin = taken = 0  # of the block that is being filled: its first span, its elements so far
        most = block_bytes(size) // width
        for tensor, start, count in pieces(counts, lo, hi):
            while count:
                part = min(count, most - taken)
                spans.append(Span(tensor, start, part))
                taken, start, count = taken + part, start + part, count - part
                if taken == most or len(spans) - begin == _MOST_SPANS:
                    self.blocks.append(Block(begin, len(spans) - begin, taken))
                    begin, taken = len(spans), 0
        if taken:
            self.blocks.append(Block(begin, len(spans) - begin, taken))
        self.counts = [span.elements for span in spans]
        self._places = [(span.tensor, span.start * width) for span in spans]
        # Each rank's array of struct iovec, and what is written there: address, length, address ...
        self._words = struct.Struct(f"{2 * len(spans)}Q")
        self._memory = ctypes.create_string_buffer(max(1, size * self._words.size))
        begin = ctypes.addressof(self._memory)
        self.tables = [begin + rank * self._words.size for rank in range(size)]
        self._described = [word for count in self.counts for word in (0, count * width)]

    def place(self, rank: int, pointers: Sequence[int]) -> list[int]:
        """Fill in where `rank` has the tensors, by their addresses: where it has the spans.

        `tables[rank]` is then its array of iovecs.
        """
        # In plain Python: so little arithmetic is done before numpy's code is in the cache.
        addresses = [pointers[tensor] + offset for tensor, offset in self._places]
        self._described[::2] = addresses
        self._words.pack_into(self._memory, rank * self._words.size, *self._described)
        return addresses


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
