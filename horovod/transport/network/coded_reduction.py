"""A sum over ranks that travels in 8 bits. Used by the TCP transport.

It works like `direct_reduction`, but rows of `eight_bits` travel: ranks send their coded numbers to
the rank that adds them up in float32, and that rank sends the coded sum to all. All ranks, that one
included, decode the same sum, so results are bitwise the same. Each block is coded when it is its
turn to be sent and decoded when it has arrived, so that arithmetic and network overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from horovod.transport import eight_bits
from horovod.transport.base import Transport
from horovod.transport.division import split_evenly
from horovod.transport.network.shares import ShareBlock, SharePlan
from horovod.transport.network.streams import MessageStream

Tensor = torch.Tensor

AHEAD = 2  # blocks of each peer that may wait for the same blocks of other peers
BLOCK_BYTES = 1024 * eight_bits.ROW  # of one block, coded


def plan_rows(counts: Sequence[int], size: int) -> SharePlan:
    """Return which rank adds up which rows of tensors with these numbers of elements."""
    rows = [eight_bits.num_rows(count) for count in counts]
    return SharePlan(rows, eight_bits.ROW, size, BLOCK_BYTES)


class CodedReduction:
    """One sum that is under way. Only the messages that it waits for refer to it.

    Args:
        rank: Our rank.
        streams: The messages of each peer.
        plan: Which rank adds up which rows, see `plan_rows`.
        tensors: What to add up, in place.
        scale: The factor for the result.
        kind: The 8-bit type.
        rows: Memory for all rows of all tensors.
    """

    def __init__(
        self,
        rank: int,
        streams: Mapping[int, MessageStream],
        plan: SharePlan,
        tensors: Sequence[Tensor],
        scale: float,
        kind: torch.dtype,
        rows: Tensor,
    ) -> None:
        self._rank = rank
        self._streams = streams
        self._plan = plan
        self._tensors = [tensor.view(-1) for tensor in tensors]
        self._scale = scale
        self._kind = kind
        self._rows = rows
        self._own_blocks = plan.blocks[rank]
        self._operands: list[dict[int, Tensor]] = [{} for _ in self._own_blocks]  # by rank
        # Memory for the blocks that arrive and for their sum, used again for each: the pages of
        # fresh memory would cost as much as the arithmetic.
        most = max((block.edges[-1] for block in self._own_blocks), default=0)
        self._arriving = torch.empty(len(streams), AHEAD, most, eight_bits.ROW, dtype=torch.uint8)
        self._total = torch.empty(most, eight_bits.BLOCK)
        starts, first = [], 0
        for tensor in self._tensors:
            starts.append(first)
            first += eight_bits.num_rows(tensor.numel())
        self._first_rows = starts

    def begin(self) -> None:
        """Queue the first messages."""
        for peer, stream in self._streams.items():
            for block in self._plan.blocks[peer]:
                rows = self._rows_of(block)
                stream.send([rows.numpy()], block.nbytes, partial(self._encode, block, rows))
        for number in range(min(AHEAD, len(self._own_blocks))):
            self._expect(number)
        if not self._own_blocks:
            for peer, stream in self._streams.items():
                self._expect_results(peer, stream)

    def _rows_of(self, block: ShareBlock) -> Tensor:
        """Return the memory of a block, whose spans follow each other."""
        first = block.spans[0]
        start = self._first_rows[first.tensor] + first.start
        return self._rows[start : start + block.edges[-1]]

    def _numbers(self, block: ShareBlock) -> Tensor:
        """Return this rank's numbers of a block, as float32: where they are, or copied."""
        parts = self._parts(block)
        if _fills_rows(parts):
            return parts[0].view(-1, eight_bits.BLOCK)
        return torch.cat([eight_bits.in_blocks(part) for part in parts])

    def _parts(self, block: ShareBlock) -> list[Tensor]:
        """Return the elements of the tensors that a block covers."""
        width = eight_bits.BLOCK
        return [
            self._tensors[span.tensor][span.start * width : (span.start + span.elements) * width]
            for span in block.spans
        ]

    def _encode(self, block: ShareBlock, rows: Tensor) -> None:
        """Write this rank's numbers of a block into rows, just before they are sent."""
        eight_bits.encode(self._numbers(block), rows, self._kind)

    def _decode(self, block: ShareBlock, rows: Tensor) -> None:
        """Write the result of a block into the tensors."""
        parts = self._parts(block)
        is_whole = _fills_rows(parts)
        blocks = (
            parts[0].view(-1, eight_bits.BLOCK)
            if is_whole
            else torch.empty(len(rows), eight_bits.BLOCK)
        )
        eight_bits.decode(rows, blocks, self._kind, factor=self._scale)
        if is_whole:
            return
        for edge, part in zip(block.edges, parts, strict=False):
            part.copy_(blocks[edge:].view(-1)[: part.numel()])

    def _expect(self, number: int) -> None:
        """Expect every peer's rows for a block of our share, and results after the last block."""
        block = self._own_blocks[number]
        for index, (peer, stream) in enumerate(self._streams.items()):
            theirs = self._arriving[index, number % AHEAD, : block.edges[-1]]
            stream.receive(
                [theirs.numpy()], block.nbytes, partial(self._on_arrival, number, peer, theirs)
            )
            if number == len(self._own_blocks) - 1:
                self._expect_results(peer, stream)

    def _expect_results(self, peer: int, stream: MessageStream) -> None:
        """Expect the coded results of a peer's share."""
        for block in self._plan.blocks[peer]:
            rows = self._rows_of(block)
            stream.receive([rows.numpy()], block.nbytes, partial(self._decode, block, rows))

    def _on_arrival(self, number: int, peer: int, theirs: Tensor) -> None:
        """Add up a block and send the sum, once the rows of all peers have arrived."""
        arrived = self._operands[number]
        arrived[peer] = theirs
        if len(arrived) < len(self._streams):
            return
        block = self._own_blocks[number]
        rows = self._rows_of(block)
        total = self._total[: len(rows)]
        for rank in range(len(self._streams) + 1):  # in rank order, whichever rank adds up
            if rank != self._rank:
                eight_bits.decode(arrived[rank], total, self._kind, add=rank > 0)
            elif rank:
                total.add_(self._numbers(block))
            else:
                total.copy_(self._numbers(block))
        arrived.clear()
        eight_bits.encode(total, rows, self._kind)
        for stream in self._streams.values():
            stream.send([rows.numpy()], block.nbytes)
        self._decode(block, rows)
        if number + AHEAD < len(self._own_blocks):
            self._expect(number + AHEAD)


def _fills_rows(parts: Sequence[Tensor]) -> bool:
    """Return whether these are float32 numbers in one place that fill the rows of a block."""
    first = parts[0]
    return len(parts) == 1 and first.dtype is torch.float32 and not first.numel() % eight_bits.BLOCK


def add_up_among_many(
    transport: Transport, tensor: Tensor, scale: float, kind: torch.dtype
) -> None:
    """Add up a tensor among many ranks: shares go to the ranks that add them up, sums to all."""
    flat = tensor.view(-1)
    blocks = eight_bits.in_blocks(flat)
    rows = torch.empty(len(blocks), eight_bits.ROW, dtype=torch.uint8)
    eight_bits.encode(blocks, rows, kind)
    shares = split_evenly(len(blocks), transport.size)
    mine = shares[transport.rank]
    nbytes = [share * eight_bits.ROW for share in shares]
    theirs = torch.empty(transport.size, mine, eight_bits.ROW, dtype=torch.uint8)
    received = [mine * eight_bits.ROW] * transport.size
    transport.alltoall(rows.view(-1), theirs.view(-1), nbytes, received)
    total = torch.zeros(mine, eight_bits.BLOCK)
    for each in theirs:
        eight_bits.decode(each, total, kind, add=True)
    own = torch.empty(mine, eight_bits.ROW, dtype=torch.uint8)
    eight_bits.encode(total, own, kind)
    transport.allgather(own.view(-1), rows.view(-1), nbytes)
    results = torch.empty(len(blocks), eight_bits.BLOCK)
    eight_bits.decode(rows, results, kind)
    flat.copy_(results.view(-1)[: flat.numel()])
    if scale != 1.0:
        flat.mul_(scale)
