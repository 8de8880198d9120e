"""Several tensors taken as one, divided among ranks, and each rank's share cut into blocks.

What follows from the sizes alone is a `SharePlan`, kept from step to step; `Memory` fills in the
tensors' addresses. Used by the TCP transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from horovod.transport import address_arrays
from horovod.transport.arithmetic import as_blocks
from horovod.transport.spans import pieces, share


class Part(NamedTuple):
    """Elements of one tensor."""

    tensor: int
    start: int
    elements: int


class Block(NamedTuple):
    """Elements that travel and are reduced together."""

    parts: list[Part]
    edges: list[int]  # where each part begins in the block, and the end
    nbytes: int


class SharePlan:
    """The blocks of every rank's share of some tensors.

    Args:
        counts: The number of elements of each tensor.
        width: The bytes of an element.
        size: The number of ranks.
        block: The bytes of a block, at most.
    """

    def __init__(self, counts: Sequence[int], width: int, size: int, block: int) -> None:
        total, most = sum(counts), max(1, block // width)
        self.blocks: list[list[Block]] = []
        for rank in range(size):
            lo, hi = share(total, width, rank, size)
            self.blocks.append(
                [
                    _block(counts, width, start, min(start + most, hi))
                    for start in range(lo, hi, most)
                ]
            )


def _block(counts: Sequence[int], width: int, lo: int, hi: int) -> Block:
    """Return the block of elements `lo` to `hi` of all tensors, end to end."""
    parts = [Part(*each) for each in pieces(counts, lo, hi)]
    edges = [0]
    for part in parts:
        edges.append(edges[-1] + part.elements)
    return Block(parts, edges, (hi - lo) * width)


class Memory:
    """The tensors' memory, as buffers to send and receive, and as operands of arithmetic."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._dtype = tensors[0].dtype
        self._width = self._dtype.itemsize
        self._addresses = [tensor.data_ptr() for tensor in tensors]

    def buffers(self, block: Block) -> list[Any]:
        """Return the block's memory, as bytes."""
        width, addresses = self._width, self._addresses
        arrays = address_arrays.arrays(
            torch.uint8,
            [addresses[part.tensor] + part.start * width for part in block.parts],
            [part.elements * width for part in block.parts],
        )
        if arrays is not None:
            return arrays
        return [part.view(torch.uint8).numpy() for part in self._parts(block)]

    def operands(self, block: Block) -> list[Any]:
        """Return the block's elements, as arrays or tensors, whichever arithmetic takes."""
        width, addresses = self._width, self._addresses
        arrays = address_arrays.arrays(
            self._dtype,
            [addresses[part.tensor] + part.start * width for part in block.parts],
            [part.elements for part in block.parts],
        )
        return arrays if arrays is not None else [as_blocks(part) for part in self._parts(block)]

    def _parts(self, block: Block) -> list[torch.Tensor]:
        return [
            self._tensors[part.tensor].view(-1)[part.start : part.start + part.elements]
            for part in block.parts
        ]


def tensor_operands(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return all elements of each tensor, as operands of arithmetic."""
    counts = [tensor.numel() for tensor in tensors]
    arrays = address_arrays.arrays(tensors[0].dtype, [t.data_ptr() for t in tensors], counts)
    return arrays if arrays is not None else [as_blocks(tensor.view(-1)) for tensor in tensors]
