"""Plans and memory of reductions over TCP, which are kept from step to step.

A training step reduces tensors of the same sizes again and again: then nothing is planned or
allocated anew. Used by the TCP transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.transport.arithmetic import BoundedCache, as_blocks
from horovod.transport.division import cut
from horovod.transport.eight_bits import BLOCK, ROW, num_rows
from horovod.transport.network import coded_reduction
from horovod.transport.network.coded_reduction import CodedPlan
from horovod.transport.network.direct_reduction import AHEAD, BlockBuffer, ShareBlock, share_blocks

BLOCK_TOTAL = 4 * 1024 * 1024  # bytes of one block, from all ranks together
SMALLEST_BLOCK = 128 * 1024  # bytes
BLOCKS = 4  # least number in a share: the results of one travel while the next arrive


class ReductionMemory:
    """The plans and the memory of one transport, among `size` ranks.

    Memory that a method returns is good until its next call with other sizes: a transport does one
    reduction at a time.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._block = BLOCK_TOTAL // size // 64 * 64
        self._plans: BoundedCache[tuple[Any, ...], list[list[ShareBlock]]] = BoundedCache()
        self._coded_plans: BoundedCache[tuple[Any, ...], CodedPlan] = BoundedCache()
        self._block_buffers: BoundedCache[tuple[Any, ...], BlockBuffer] = BoundedCache()
        self.clear()

    def clear(self) -> None:
        """Release the memory."""
        self._block_buffers.clear()
        self._coded_plans.clear()
        self._blocks = torch.empty(0, dtype=torch.uint8)
        self._narrow = torch.empty(0)
        self._rows = self._arriving = self._total = torch.empty(0)

    def blocks(self, tensors: Sequence[torch.Tensor]) -> list[list[ShareBlock]]:
        """Return the blocks of every rank's share of tensors of these sizes."""
        width, counts = tensors[0].dtype.itemsize, tuple([t.numel() for t in tensors])
        plan = self._plans.get((width, counts))
        if plan is None:
            share = sum(counts) * width // self._size
            block = min(self._block, max(SMALLEST_BLOCK, share // BLOCKS // 64 * 64))
            plan = self._plans[width, counts] = share_blocks(counts, width, self._size, block)
        return plan

    def block(self, dtype: torch.dtype, peer: int, slot: int, count: int) -> BlockBuffer:
        """Return memory into which `count` elements of a peer may arrive, one of its slots."""
        key = (dtype, peer, slot, count)
        buffer = self._block_buffers.get(key)
        if buffer is None:
            per_peer = AHEAD * self._block
            if not self._blocks.numel():
                self._blocks = torch.empty(self._size * per_peer, dtype=torch.uint8)
            start = peer * per_peer + slot * self._block
            memory = self._blocks[start : start + count * dtype.itemsize]
            buffer = BlockBuffer(memory.numpy(), as_blocks(memory.view(dtype)))
            self._block_buffers[key] = buffer
        return buffer

    def narrow(self, tensors: Sequence[torch.Tensor], wire: torch.dtype) -> torch.Tensor:
        """Return the tensors, end to end, as one tensor of a narrower type."""
        count = sum([tensor.numel() for tensor in tensors])
        if self._narrow.dtype is not wire or self._narrow.numel() < count:
            self._narrow = torch.empty(count, dtype=wire)
        narrow = self._narrow[:count]
        parts = cut(narrow, [tensor.numel() for tensor in tensors])
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.view(-1))
        return narrow

    def coded_plan(
        self, tensors: Sequence[torch.Tensor], rank: int, kind: torch.dtype
    ) -> CodedPlan:
        """Return the plan, with its memory, for a sum of such tensors that travels in 8 bits."""
        counts = tuple([tensor.numel() for tensor in tensors])
        plan = self._coded_plans.get((kind, counts))
        if plan is None:
            count = sum([num_rows(each) for each in counts])
            if len(self._rows) < count:
                self._coded_plans.clear()  # they would keep the old memory
                self._rows = torch.empty(count, ROW, dtype=torch.uint8)
            if not self._total.numel():
                shape = (self._size, AHEAD, coded_reduction.BLOCK_ROWS, ROW)
                self._arriving = torch.empty(shape, dtype=torch.uint8)
                self._total = torch.empty(coded_reduction.BLOCK_ROWS, BLOCK)
            memory = (self._rows[:count], self._arriving, self._total)
            plan = CodedPlan(counts, rank, self._size, kind, *memory)
            self._coded_plans[kind, counts] = plan
        return plan


def widen(narrow: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float) -> None:
    """Copy a result of a narrower type into `tensors`, and multiply it."""
    parts = cut(narrow, [tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.view(-1).copy_(part)
        if scale != 1.0:
            tensor.mul_(scale)
