"""A sum over ranks that travels in 8 bits. Used by the TCP transport.

It works like `direct_reduction`, but rows of `eight_bits` travel: ranks send their coded numbers to
the rank that adds them up in float32, and that rank sends the coded sum to all. All ranks, that one
included, decode the same sum, so results are bitwise the same. Each block is coded when it is its
turn to be sent and decoded when it has arrived, so that arithmetic and network overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from horovod.transport import eight_bits
from horovod.transport.base import Transport
from horovod.transport.division import split_evenly
from horovod.transport.eight_bits import Rows
from horovod.transport.network.direct_reduction import AHEAD, ShareBlock, share_blocks
from horovod.transport.network.streams import MessageStream

Tensor = torch.Tensor

BLOCK_ROWS = 1024  # rows of one block, at most


class CodedBlock(NamedTuple):
    """Rows that travel and are added up together."""

    share: ShareBlock
    rows: Rows
    buffer: Any  # their memory, as the kernel takes it


class CodedPlan:
    """Which rank adds up which rows of some tensors, and the memory for it.

    It follows from the sizes of the tensors, and is kept from step to step.

    Args:
        counts: The number of elements of each tensor.
        rank: Our rank.
        size: The number of ranks.
        kind: The 8-bit type.
        rows: Memory for all rows of all tensors.
        arriving: Memory for AHEAD blocks of every rank.
        total: Memory for the sum of a block.
    """

    def __init__(
        self,
        counts: Sequence[int],
        rank: int,
        size: int,
        kind: torch.dtype,
        rows: Tensor,
        arriving: Tensor,
        total: Tensor,
    ) -> None:
        row_counts = [eight_bits.num_rows(count) for count in counts]
        shares = share_blocks(row_counts, eight_bits.ROW, size, BLOCK_ROWS * eight_bits.ROW)
        self.kind = kind
        self.blocks: list[list[CodedBlock]] = []  # of every rank's share
        start = 0
        for blocks in shares:
            self.blocks.append([])
            for block in blocks:
                end = start + block.edges[-1]
                self.blocks[-1].append(_coded_block(block, rows[start:end], kind))
                start = end
        self.own = self.blocks[rank]
        # Where the rows of each peer arrive for each of our blocks.
        self.arriving = [
            {
                peer: _coded_block(
                    block.share, arriving[peer, number % AHEAD, : block.share.edges[-1]], kind
                )
                for peer in range(size)
                if peer != rank
            }
            for number, block in enumerate(self.own)
        ]
        self.totals = [total[: block.share.edges[-1]] for block in self.own]


def _coded_block(share: ShareBlock, memory: Tensor, kind: torch.dtype) -> CodedBlock:
    """Return a block whose rows are in this memory."""
    return CodedBlock(share, Rows(memory, kind), memory.numpy())


class CodedReduction:
    """One sum that is under way. Only the messages that it waits for refer to it.

    Args:
        rank: Our rank.
        streams: The messages of each peer.
        plan: The plan that says which rank adds up which rows, and where.
        tensors: The tensors to add up, in place.
        scale: The factor for the result.
    """

    def __init__(
        self,
        rank: int,
        streams: Mapping[int, MessageStream],
        plan: CodedPlan,
        tensors: Sequence[Tensor],
        scale: float,
    ) -> None:
        self._rank = rank
        self._streams = streams
        self._plan = plan
        self._tensors = [tensor.view(-1) for tensor in tensors]
        self._scale = scale
        self._arrived = [0 for _ in plan.own]  # peers whose rows are there, of each block

    def begin(self) -> None:
        """Queue the first messages."""
        for peer, stream in self._streams.items():
            for block in self._plan.blocks[peer]:
                stream.send([block.buffer], block.share.nbytes, partial(self._encode, block))
        for number in range(min(AHEAD, len(self._plan.own))):
            self._expect(number)
        if not self._plan.own:
            for peer, stream in self._streams.items():
                self._expect_results(peer, stream)

    def _numbers(self, share: ShareBlock) -> Tensor:
        """Return this rank's numbers of a block, as float32: where they are, or copied."""
        parts = self._parts(share)
        if _fills_rows(parts):
            return parts[0].view(-1, eight_bits.BLOCK)
        return torch.cat([eight_bits.in_blocks(part) for part in parts])

    def _parts(self, share: ShareBlock) -> list[Tensor]:
        """Return the elements of the tensors that a block covers."""
        width = eight_bits.BLOCK
        return [
            self._tensors[span.tensor][span.start * width : (span.start + span.elements) * width]
            for span in share.spans
        ]

    def _encode(self, block: CodedBlock) -> None:
        """Write this rank's numbers of a block into its rows, just before they are sent."""
        block.rows.encode(self._numbers(block.share))

    def _decode(self, block: CodedBlock) -> None:
        """Write the result of a block into the tensors."""
        parts = self._parts(block.share)
        if _fills_rows(parts):
            block.rows.decode(parts[0].view(-1, eight_bits.BLOCK), factor=self._scale)
            return
        blocks = torch.empty(block.share.edges[-1], eight_bits.BLOCK)
        block.rows.decode(blocks, factor=self._scale)
        for edge, part in zip(block.share.edges, parts, strict=False):
            part.copy_(blocks[edge:].view(-1)[: part.numel()])

    def _expect(self, number: int) -> None:
        """Expect every peer's rows for a block of our share, and results after the last block."""
        nbytes = self._plan.own[number].share.nbytes
        arriving = self._plan.arriving[number]
        for peer, stream in self._streams.items():
            stream.receive([arriving[peer].buffer], nbytes, partial(self._on_arrival, number))
            if number == len(self._plan.own) - 1:
                self._expect_results(peer, stream)

    def _expect_results(self, peer: int, stream: MessageStream) -> None:
        """Expect the coded results of a peer's share."""
        for block in self._plan.blocks[peer]:
            stream.receive([block.buffer], block.share.nbytes, partial(self._decode, block))

    def _on_arrival(self, number: int) -> None:
        """Add up a block and send the sum, once the rows of all peers have arrived."""
        self._arrived[number] += 1
        if self._arrived[number] < len(self._streams):
            return
        block, total = self._plan.own[number], self._plan.totals[number]
        arrived = self._plan.arriving[number]
        # In rank order, whichever rank adds up. The first two may be swapped: their sum is the
        # same, and ours need not be copied.
        others = list(arrived)
        arrived[others[0]].rows.decode(total)
        if self._rank <= 1:
            total.add_(self._numbers(block.share))
        for rank in others[1:]:
            arrived[rank].rows.decode(total, add=True)
            if rank + 1 == self._rank:
                total.add_(self._numbers(block.share))
        block.rows.encode(total)
        for stream in self._streams.values():
            stream.send([block.buffer], block.share.nbytes)
        self._decode(block)
        if number + AHEAD < len(self._plan.own):
            self._expect(number + AHEAD)


def _fills_rows(parts: Sequence[Tensor]) -> bool:
    """Return whether these are float32 numbers in one piece of memory that fill whole rows."""
    first = parts[0]
    return len(parts) == 1 and first.dtype is torch.float32 and not first.numel() % eight_bits.BLOCK


def add_up_among_many(
    transport: Transport, tensor: Tensor, scale: float, kind: torch.dtype
) -> None:
    """Add up a tensor among many ranks: shares go to the ranks that add them up, sums to all."""
    flat = tensor.view(-1)
    blocks = eight_bits.in_blocks(flat)
    rows = torch.empty(len(blocks), eight_bits.ROW, dtype=torch.uint8)
    Rows(rows, kind).encode(blocks)
    shares = split_evenly(len(blocks), transport.size)
    mine = shares[transport.rank]
    nbytes = [share * eight_bits.ROW for share in shares]
    theirs = torch.empty(transport.size, mine, eight_bits.ROW, dtype=torch.uint8)
    received = [mine * eight_bits.ROW] * transport.size
    transport.alltoall(rows.view(-1), theirs.view(-1), nbytes, received)
    total = torch.zeros(mine, eight_bits.BLOCK)
    for each in theirs:
        Rows(each, kind).decode(total, add=True)
    own = torch.empty(mine, eight_bits.ROW, dtype=torch.uint8)
    Rows(own, kind).encode(total)
    transport.allgather(own.view(-1), rows.view(-1), nbytes)
    results = torch.empty(len(blocks), eight_bits.BLOCK)
    Rows(rows, kind).decode(results)
    flat.copy_(results.view(-1)[: flat.numel()])
    if scale != 1.0:
        flat.mul_(scale)
