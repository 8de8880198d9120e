"""A sum over ranks that travels in 8 bits. Used by the TCP transport.

Like `direct_reduction`, but what travels are rows of `eight_bits`: ranks send their numbers as
such to the rank that adds them up in float32, and it sends the coded sum to all. Everybody, itself
included, goes by what the code says, so results are bitwise the same. Each block is coded when it
is its turn to be sent and decoded when it has arrived, so that arithmetic and network overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from horovod.transport import eight_bits
from horovod.transport.base import Transport
from horovod.transport.pairwise import split_evenly
from horovod.transport.shares import Block, SharePlan
from horovod.transport.streams import MessageStream

Tensor = torch.Tensor

AHEAD = 2  # blocks of each peer that may wait for those of others
BLOCK_BYTES = 1024 * eight_bits.ROW  # of one block, coded


def plan_rows(counts: Sequence[int], size: int) -> SharePlan:
    """Who adds up which rows of tensors with these many elements."""
    rows = [eight_bits.num_rows(count) for count in counts]
    return SharePlan(rows, eight_bits.ROW, size, BLOCK_BYTES)


class CodedReduction:
    """What one sum still has to do; only the messages that it waits for refer to it."""

    def __init__(
        self,
        rank: int,
        streams: Mapping[int, MessageStream],
        plan: SharePlan,
        tensors: Sequence[Tensor],
        scale: float,
        kind: torch.dtype,
        rows: Tensor,  # memory for all rows of all tensors
    ) -> None:
        self._rank = rank
        self._streams = streams
        self._plan = plan
        self._tensors = [tensor.view(-1) for tensor in tensors]
        self._scale = scale
        self._kind = kind
        self._rows = rows
        self._mine = plan.blocks[rank]
        self._arrived: list[dict[int, Tensor]] = [{} for _ in self._mine]  # of each block, by rank
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
        for number in range(min(AHEAD, len(self._mine))):
            self._expect(number)
        if not self._mine:
            for peer, stream in self._streams.items():
                self._expect_results(peer, stream)

    def _rows_of(self, block: Block) -> Tensor:
        """The memory of a block: its parts follow each other."""
        first = block.parts[0]
        start = self._first_rows[first.tensor] + first.start
        return self._rows[start : start + block.edges[-1]]

    def _numbers(self, block: Block) -> Tensor:
        """This rank's numbers of a block, as float32."""
        return torch.cat([eight_bits.in_blocks(part) for part in self._parts(block)])

    def _parts(self, block: Block) -> list[Tensor]:
        """The elements of the tensors that a block covers."""
        width = eight_bits.BLOCK
        return [
            self._tensors[part.tensor][part.start * width : (part.start + part.elements) * width]
            for part in block.parts
        ]

    def _encode(self, block: Block, rows: Tensor) -> None:
        eight_bits.encode(self._numbers(block), rows, self._kind)

    def _decode(self, block: Block, rows: Tensor) -> None:
        """Put the result of a block where it belongs."""
        blocks = torch.empty(len(rows), eight_bits.BLOCK)
        eight_bits.decode(rows, blocks, self._kind)
        if self._scale != 1.0:
            blocks.mul_(self._scale)
        for edge, part in zip(block.edges, self._parts(block), strict=False):
            part.copy_(blocks[edge:].view(-1)[: part.numel()])

    def _expect(self, number: int) -> None:
        block = self._mine[number]
        for peer, stream in self._streams.items():
            theirs = torch.empty(block.edges[-1], eight_bits.ROW, dtype=torch.uint8)
            stream.receive(
                [theirs.numpy()], block.nbytes, partial(self._came, number, peer, theirs)
            )
            if number == len(self._mine) - 1:
                self._expect_results(peer, stream)

    def _expect_results(self, peer: int, stream: MessageStream) -> None:
        for block in self._plan.blocks[peer]:
            rows = self._rows_of(block)
            stream.receive([rows.numpy()], block.nbytes, partial(self._decode, block, rows))

    def _came(self, number: int, peer: int, theirs: Tensor) -> None:
        arrived = self._arrived[number]
        arrived[peer] = theirs
        if len(arrived) < len(self._streams):
            return
        block = self._mine[number]
        rows = self._rows_of(block)
        total = (
            self._numbers(block) if self._rank == 0 else torch.zeros(len(rows), eight_bits.BLOCK)
        )
        for rank in range(len(self._streams) + 1):  # in this order, whoever adds up
            if rank != self._rank:
                eight_bits.decode(arrived[rank], total, self._kind, add=True)
            elif rank:
                total.add_(self._numbers(block))
        arrived.clear()
        eight_bits.encode(total, rows, self._kind)
        for stream in self._streams.values():
            stream.send([rows.numpy()], block.nbytes)
        self._decode(block, rows)
        if number + AHEAD < len(self._mine):
            self._expect(number + AHEAD)


def add_up_among_many(
    transport: Transport, tensor: Tensor, scale: float, kind: torch.dtype
) -> None:
    """The same among many ranks: shares go to those that add them up, and sums to all."""
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
