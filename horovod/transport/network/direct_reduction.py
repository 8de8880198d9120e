"""One allreduce among few ranks that all talk to each other, block by block.

Used by the TCP transport. A rank collects and reduces its share of the tensors and sends out every
finished block while later ones are still arriving. Messages are queued on the streams of the peers,
and each arrival calls the next step of the reduction.

The blocks (`share_blocks`) follow from the sizes of the tensors alone, and are kept from step to
step; `Memory` fills in the tensors' addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import arrays_at, as_blocks, reduce_into
from horovod.transport.division import Span, pieces, share
from horovod.transport.network.streams import MessageStream

AHEAD = 2  # blocks of each peer that may wait for the same blocks of other peers


class BlockBuffer(NamedTuple):
    """Scratch memory for a block, as the kernel and as arithmetic take it."""

    buffer: Any
    operand: Any


class ShareBlock(NamedTuple):
    """Elements that travel and are reduced together."""

    spans: list[Span]
    edges: list[int]  # where each span begins in the block, and the end
    nbytes: int


def share_blocks(
    counts: Sequence[int], width: int, size: int, most_bytes: int
) -> list[list[ShareBlock]]:
    """Cut tensors, taken end to end, into a share for each rank, and each share into blocks.

    Args:
        counts: The number of elements of each tensor.
        width: The bytes of an element.
        size: The number of ranks.
        most_bytes: The bytes of a block, at most.

    Returns:
        The blocks of every rank's share.
    """
    total, most = sum(counts), max(1, most_bytes // width)
    shares = []
    for rank in range(size):
        lo, hi = share(total, width, rank, size)
        shares.append([_block(counts, width, at, min(at + most, hi)) for at in range(lo, hi, most)])
    return shares


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
        self._addresses = [tensor.data_ptr() for tensor in tensors]

    def buffers(self, block: ShareBlock) -> list[Any]:
        """Return the block's memory, as bytes."""
        arrays = self._arrays(block, torch.uint8)
        if arrays is not None:
            return arrays
        return [part.view(torch.uint8).numpy() for part in self._tensor_parts(block)]

    def operands(self, block: ShareBlock) -> list[Any]:
        """Return the block's elements, as arrays or tensors, whichever arithmetic takes."""
        arrays = self._arrays(block, self._dtype)
        if arrays is not None:
            return arrays
        return [as_blocks(part) for part in self._tensor_parts(block)]

    def _arrays(self, block: ShareBlock, dtype: torch.dtype) -> list[Any] | None:
        """Return the spans of a block as arrays of `dtype`, or None if there can be none."""
        width, addresses = self._dtype.itemsize, self._addresses
        per_element = width // dtype.itemsize
        return arrays_at(
            dtype,
            [addresses[span.tensor] + span.start * width for span in block.spans],
            [span.elements * per_element for span in block.spans],
        )

    def _tensor_parts(self, block: ShareBlock) -> list[torch.Tensor]:
        """Return the spans of a block as tensors."""
        return [
            self._tensors[span.tensor].view(-1)[span.start : span.start + span.elements]
            for span in block.spans
        ]


class DirectReduction:
    """One allreduce that is under way.

    Only the messages that it waits for refer to it, so that the tensors are released with the last
    message. A cycle of references would keep each step's gradients until Python's collector runs,
    and every step would have to begin with fresh memory.

    Args:
        rank: Our rank.
        streams: The messages of each peer.
        blocks: The blocks of every rank's share of the tensors.
        tensors: The tensors to reduce, in place.
        op: SUM, MIN, MAX or PRODUCT.
        scale: The factor for the result.
        scratch: A function that returns memory for a block, given a peer, a slot below AHEAD, and
            the number of elements.
    """

    def __init__(
        self,
        rank: int,
        streams: Mapping[int, MessageStream],
        blocks: Sequence[Sequence[ShareBlock]],
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float,
        scratch: Callable[[int, int, int], BlockBuffer],
    ) -> None:
        self._rank = rank
        self._streams = streams
        self._blocks = blocks
        self._memory = Memory(tensors)
        self._op = op
        self._scale = scale
        self._scratch = scratch
        self._own_blocks = blocks[rank]
        self._operands: list[dict[int, Any]] = [{} for _ in self._own_blocks]  # arrived, by rank

    def begin(self) -> None:
        """Queue the first messages.

        A peer sends the result of a block after it has received our data for that block. So our
        data has left when the result overwrites it.
        """
        for peer, stream in self._streams.items():
            for block in self._blocks[peer]:
                stream.send(self._memory.buffers(block), block.nbytes)
        for number in range(min(AHEAD, len(self._own_blocks))):
            self._expect(number)
        if not self._own_blocks:
            for peer, stream in self._streams.items():
                self._expect_results(peer, stream)

    def _expect(self, number: int) -> None:
        """Expect every peer's data for a block of our share, and results after the last block."""
        block = self._own_blocks[number]
        for peer, stream in self._streams.items():
            buffer = self._scratch(peer, number % AHEAD, block.edges[-1])
            then = partial(self._on_arrival, number, peer, buffer.operand)
            stream.receive([buffer.buffer], block.nbytes, then)
            if number == len(self._own_blocks) - 1:
                self._expect_results(peer, stream)

    def _expect_results(self, peer: int, stream: MessageStream) -> None:
        """Expect the results of a peer's share, straight into our tensors."""
        for block in self._blocks[peer]:
            stream.receive(self._memory.buffers(block), block.nbytes)

    def _on_arrival(self, number: int, peer: int, operand: Any) -> None:
        """Reduce a block and send the result, once the data of all peers has arrived."""
        theirs = self._operands[number]
        theirs[peer] = operand
        if len(theirs) < len(self._streams):
            return
        block = self._own_blocks[number]
        for start, stop, own in zip(
            block.edges, block.edges[1:], self._memory.operands(block), strict=False
        ):
            operands = [
                own if rank == self._rank else theirs[rank][start:stop]
                for rank in range(len(self._streams) + 1)
            ]
            reduce_into(own, operands, self._op)
            if self._scale != 1.0:
                own *= self._scale
        for stream in self._streams.values():
            stream.send(self._memory.buffers(block), block.nbytes)
        if number + AHEAD < len(self._own_blocks):
            self._expect(number + AHEAD)
