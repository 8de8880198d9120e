"""One allreduce among few ranks that all talk to each other, block by block.

Used by the TCP transport. A rank collects and reduces its share of the tensors and sends out every
finished block while later ones are still arriving. Messages are queued on the streams of the peers;
what follows the arrival of one happens while they are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import reduce_into
from horovod.transport.shares import Memory, SharePlan
from horovod.transport.streams import MessageStream

AHEAD = 2  # blocks of each peer that may wait for those of others


class BlockBuffer(NamedTuple):
    """Scratch memory for a block, as the kernel and as arithmetic take it."""

    buffer: Any
    operand: Any


class DirectReduction:
    """What one allreduce still has to do.

    Only the messages that it waits for refer to it, so that it lets go of the tensors with the last
    one. A cycle of references would keep each step's gradients until Python's collector runs, and
    every step would have to begin with fresh memory.
    """

    def __init__(
        self,
        rank: int,
        streams: Mapping[int, MessageStream],
        plan: SharePlan,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float,
        scratch: Callable[[int, int, int], BlockBuffer],  # of a peer, a slot, so many elements
    ) -> None:
        self._rank = rank
        self._streams = streams
        self._plan = plan
        self._memory = Memory(tensors)
        self._op = op
        self._scale = scale
        self._scratch = scratch
        self._mine = plan.blocks[rank]
        self._arrived: list[dict[int, Any]] = [{} for _ in self._mine]  # of each block, by rank

    def begin(self) -> None:
        """Queue the first messages.

        A peer's result for a block arrives after it has our part of that block: so what it
        overwrites has left.
        """
        for peer, stream in self._streams.items():
            for block in self._plan.blocks[peer]:
                stream.send(self._memory.buffers(block), block.nbytes)
        for number in range(min(AHEAD, len(self._mine))):
            self._expect(number)
        if not self._mine:
            for peer, stream in self._streams.items():
                self._expect_results(peer, stream)

    def _expect(self, number: int) -> None:
        block = self._mine[number]
        for peer, stream in self._streams.items():
            buffer = self._scratch(peer, number % AHEAD, block.edges[-1])
            then = partial(self._came, number, peer, buffer.operand)
            stream.receive([buffer.buffer], block.nbytes, then)
            if number == len(self._mine) - 1:
                self._expect_results(peer, stream)

    def _expect_results(self, peer: int, stream: MessageStream) -> None:
        for block in self._plan.blocks[peer]:
            stream.receive(self._memory.buffers(block), block.nbytes)

    def _came(self, number: int, peer: int, operand: Any) -> None:
        theirs = self._arrived[number]
        theirs[peer] = operand
        if len(theirs) < len(self._streams):
            return
        block = self._mine[number]
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
        if number + AHEAD < len(self._mine):
            self._expect(number + AHEAD)
