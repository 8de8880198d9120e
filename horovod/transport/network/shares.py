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
from horovod.transport.spans import Span, pieces, share


class ShareBlock(NamedTuple):
    """Elements that travel and are reduced together."""

    spans: list[Span]
    edges: list[int]  # where each span begins in the block, and the end
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
        self.blocks: list[list[ShareBlock]] = []
        for rank in range(size):
            lo, hi = share(total, width, rank, size)
            self.blocks.append(
                [
                    _block(counts, width, start, min(start + most, hi))
                    for start in range(lo, hi, most)
                ]
            )


def _block(counts: Sequence[int], width: int, lo: int, hi: int) -> ShareBlock:
    """Return the block of elements `lo` to `hi` of all tensors, end to end."""
    spans = [Span(*each) for each in pieces(counts, lo, hi)]
    edges = [0]
    for span in spans:
        edges.append(edges[-1] + span.elements)
    return ShareBlock(spans, edges, (hi - lo) * width)


class Memory:
    """The tensors' memory, as buffers to send and receive, and as operands of arithmetic."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._dtype = tensors[0].dtype
        self._width = self._dtype.itemsize
        self._addresses = [tensor.data_ptr() for tensor in tensors]

    def buffers(self, block: ShareBlock) -> list[Any]:
        """Return the block's memory, as bytes."""
        width, addresses = self._width, self._addresses
        arrays = address_arrays.arrays(
            torch.uint8,
            [addresses[span.tensor] + span.start * width for span in block.spans],
            [span.elements * width for span in block.spans],
        )
        if arrays is not None:
            return arrays
        return [part.view(torch.uint8).numpy() for part in self._tensor_parts(block)]

    def operands(self, block: ShareBlock) -> list[Any]:
        """Return the block's elements, as arrays or tensors, whichever arithmetic takes."""
        width, addresses = self._width, self._addresses
        arrays = address_arrays.arrays(
            self._dtype,
            [addresses[span.tensor] + span.start * width for span in block.spans],
            [span.elements for span in block.spans],
        )
        return (
            arrays
            if arrays is not None
            else [as_blocks(part) for part in self._tensor_parts(block)]
        )

    def _tensor_parts(self, block: ShareBlock) -> list[torch.Tensor]:
        """Return the spans of a block as tensors."""
        return [
            self._tensors[span.tensor].view(-1)[span.start : span.start + span.elements]
            for span in block.spans
        ]


def tensor_operands(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return all elements of each tensor, as operands of arithmetic."""
    counts = [tensor.numel() for tensor in tensors]
    arrays = address_arrays.arrays(tensors[0].dtype, [t.data_ptr() for t in tensors], counts)
    return arrays if arrays is not None else [as_blocks(tensor.view(-1)) for tensor in tensors]
