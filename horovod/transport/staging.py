"""Reducing tensors through memory that all ranks of one host map.

Each rank copies its tensors, end to end, into an area of its own, reduces its share of everybody's
area in place, and copies everybody's share of the result out again. Nobody touches the memory of
another process, so the kernel has no part in it: the best way for tensors of medium size among more
than two ranks, and the only one where the kernel keeps processes apart. Used by the shared-memory
transport, which lets ranks step together.

A rank has two areas and takes them in turns. It fills one before a step that all ranks take
together, so whoever fills it again, two turns later, has seen everybody begin the turn in between,
that is, finish with this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from typing import Any

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import as_blocks, reduce_into
from horovod.transport.spans import block_bytes, pieces, share


class AreaReducer:
    """One rank's side of such reductions.

    `memories` are all ranks' segments, mapped at `addresses`; from `offset` on each has two areas
    of `nbytes`.
    """

    def __init__(
        self,
        rank: int,
        memories: Sequence[Any],
        addresses: Sequence[int],
        offset: int,
        nbytes: int,
    ) -> None:
        self.rank = rank
        self.size = len(memories)
        self.nbytes = nbytes
        self._memories = memories
        self._offset = offset
        self._addresses = [(base + offset, base + offset + nbytes) for base in addresses]
        # Start at different peers to avoid contention.
        self._order = [(rank + distance) % self.size for distance in range(self.size)]
        self._block = block_bytes(self.size)
        self._scratch = torch.empty(self._block, dtype=torch.uint8)
        self._known: dict[torch.dtype, tuple[list[tuple[Any, Any]], Any]] = {}
        self._turn = 0

    def fill(self, tensors: Sequence[torch.Tensor], start: int = 0) -> int:
        """Copy what fits of the tensors, from element `start` on, into our next area: which one."""
        self._turn ^= 1
        to, width = self._addresses[self.rank][self._turn], tensors[0].element_size()
        if len(tensors) == 1:
            skipped = start * width
            nbytes = min(tensors[0].nbytes - skipped, self.nbytes)
            memmove(to, tensors[0].data_ptr() + skipped, nbytes)
        else:
            for address, nbytes in _spans(tensors, width, start, start + self.nbytes // width):
                memmove(to, address, nbytes)
                to += nbytes
        return self._turn

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        areas: Sequence[int],
        op: ReduceOp,
        scale: float,
        step: Callable[[], None],
    ) -> None:
        """Reduce `tensors`, whose beginning everybody has filled into the area that `areas` say.

        `step` lets the ranks take a step together.
        """
        dtype, width = tensors[0].dtype, tensors[0].element_size()
        total, room = sum([tensor.numel() for tensor in tensors]), self.nbytes // width
        turn = 0
        for start in range(0, total, room):
            if start:
                self.fill(tensors, start)
                step()
                turn ^= 1
            count = min(room, total - start)
            self._reduce_share(dtype, areas, turn, count, op, scale)
            step()
            for rank in self._order:
                lo, hi = share(count, width, rank, self.size)
                source = self._addresses[rank][areas[rank] ^ turn] + lo * width
                if len(tensors) == 1:
                    to = tensors[0].data_ptr() + (start + lo) * width
                    memmove(to, source, (hi - lo) * width)
                else:
                    for address, nbytes in _spans(tensors, width, start + lo, start + hi):
                        memmove(address, source, nbytes)
                        source += nbytes

    def _reduce_share(
        self,
        dtype: torch.dtype,
        areas: Sequence[int],
        turn: int,
        count: int,
        op: ReduceOp,
        scale: float,
    ) -> None:
        """Nobody else reads our area at our own share, so the result goes there."""
        views, scratch = self._views(dtype)
        operands = [view[area ^ turn] for view, area in zip(views, areas, strict=True)]
        lo, hi = share(count, dtype.itemsize, self.rank, self.size)
        most = self._block // dtype.itemsize
        for begin in range(lo, hi, most):
            end = min(begin + most, hi)
            output = operands[self.rank][begin:end]
            blocks = [operand[begin:end] for operand in operands]
            reduce_into(output, blocks, op, scratch[: end - begin])
            if scale != 1.0:
                output *= scale

    def _views(self, dtype: torch.dtype) -> tuple[list[tuple[Any, Any]], Any]:
        """Both areas of every rank, and scratch memory, as what arithmetic takes."""
        known = self._known.get(dtype)
        if known is None:
            count = self.nbytes // dtype.itemsize

            def view(memory: Any, area: int) -> Any:
                at = self._offset + area * self.nbytes
                return as_blocks(torch.frombuffer(memory, dtype=dtype, count=count, offset=at))

            views = [(view(memory, 0), view(memory, 1)) for memory in self._memories]
            known = self._known[dtype] = views, as_blocks(self._scratch.view(dtype))
        return known


def _spans(
    tensors: Sequence[torch.Tensor], width: int, start: int, stop: int
) -> list[tuple[int, int]]:
    """Address and bytes of each piece of elements `start` to `stop` of the tensors, end to end."""
    counts = [tensor.numel() for tensor in tensors]
    return [
        (tensors[number].data_ptr() + first * width, count * width)
        for number, first, count in pieces(counts, start, stop)
    ]
