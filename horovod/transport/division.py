"""Dividing flat tensors into slices, and several tensors, taken end to end, into shares and blocks.

Used by the transports. Each rank reduces its share. A block of it is so small that the blocks of
all ranks fit into the second-level cache. Where tensors are small a block covers several of them,
each with one *span* of memory, and the kernel moves all spans of a block in one call. What follows
from the sizes of the tensors alone is kept in a `Layout`, so that a training step only fills in the
addresses.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

_LARGEST_BLOCK = 256 * 1024  # bytes
_IN_CACHE = 1024 * 1024  # bytes of the cache for the blocks of all ranks together
SPAN = 16  # bytes of the kernel's struct iovec: address and length
_MOST_SPANS = 1024  # in one call of the kernel, whose limit this is


def split_evenly(count: int, parts: int) -> list[int]:
    """Return `parts` nearly equal numbers, larger ones first, whose sum is `count`."""
    share, rest = divmod(count, parts)
    return [share + (index < rest) for index in range(parts)]


def offsets_of(counts: Sequence[int]) -> list[int]:
    """Return where each of the consecutive slices with these counts begins."""
    return [0, *accumulate(counts)][:-1]


def cut(tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return the consecutive slices of `tensor` that have these numbers of elements."""
    starts = offsets_of(counts)
    return [tensor[s : s + count] for s, count in zip(starts, counts, strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a flat, contiguous tensor.

    A tensor of one element or none counts as contiguous with any stride, but `view` refuses it.
    """
    if tensor.stride(0) != 1:
        tensor = tensor.as_strided(tensor.shape, (1,))
    return tensor.view(torch.uint8)


def overlaps(left: Sequence[int], right: Sequence[int]) -> list[list[int]]:
    """Return [i][j]: how many elements slice i of one division shares with slice j of another.

    Both divide the same data, into slices with the counts `left` and `right`.
    """
    return [
        [
            max(0, min(start + count, begin + length) - max(start, begin))
            for begin, length in zip(offsets_of(right), right, strict=True)
        ]
        for start, count in zip(offsets_of(left), left, strict=True)
    ]


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
    """The blocks of one rank's share, and the addresses of their spans on every rank.

    Args:
        counts: The number of elements of each tensor.
        width: The bytes of an element.
        rank: Our rank.
        size: The number of ranks.
    """

    def __init__(self, counts: Sequence[int], width: int, rank: int, size: int) -> None:
        self.blocks: list[Block] = []
        self.spans: list[Span] = []
        spans = self.spans
        lo, hi = share(sum(counts), width, rank, size)
        begin = taken = 0  # the first span of the block that is being filled, and its elements
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
        self._offsets = [(span.tensor, span.start * width) for span in spans]
        # Each rank has an array of struct iovec here: address, length, address, length, ...
        self._table = struct.Struct(f"{2 * len(spans)}Q")
        self._memory = ctypes.create_string_buffer(max(1, size * self._table.size))
        begin = ctypes.addressof(self._memory)
        self.tables = [begin + rank * self._table.size for rank in range(size)]
        self._table_words = [word for count in self.counts for word in (0, count * width)]

    def locate(self, rank: int, pointers: Sequence[int]) -> list[int]:
        """Fill `tables[rank]` with the addresses of the spans on a rank.

        Args:
            rank: The rank.
            pointers: The addresses of its tensors.

        Returns:
            The addresses of its spans.
        """
        # Plain Python: this little arithmetic is done before numpy's code is even in the cache.
        addresses = [pointers[tensor] + offset for tensor, offset in self._offsets]
        self._table_words[::2] = addresses
        self._table.pack_into(self._memory, rank * self._table.size, *self._table_words)
        return addresses


def block_bytes(size: int) -> int:
    """Return the bytes of a block among `size` ranks."""
    return min(_LARGEST_BLOCK, max(_IN_CACHE // size // 4096 * 4096, 16 * 1024))


def share(count: int, width: int, rank: int, size: int) -> tuple[int, int]:
    """Return first and end of a rank's share of `count` elements, cut at cache lines.

    `width` is the bytes of an element. No two ranks then write to one cache line.
    """
    line = max(1, 64 // width)
    each = -(-count // (size * line)) * line
    return min(count, rank * each), min(count, (rank + 1) * each)


def pieces(counts: Sequence[int], lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of elements `lo` to `hi` of all tensors, end to end.

    Each part is the number of a tensor, the first element in it, and the count of elements.
    """
    begin = 0
    for tensor, count in enumerate(counts):
        first, last = max(lo, begin), min(hi, begin + count)
        if first < last:
            yield tensor, first - begin, last - first
        begin += count
