"""Reducing tensors through memory that all ranks of one host map.

Each rank copies its tensors, end to end, into an area of its own. It reduces its share of all
ranks' areas in place, and copies every rank's share of the result out again. No rank touches the
private memory of another process, so no system call is needed. That is the best way for tensors of
medium size among more than two ranks, and the only way where the kernel keeps processes apart. Used
by the shared-memory transport, which lets ranks step together.

A rank has two areas and uses them in turn, so nobody needs a lock. It fills an area before a step
that all ranks take together. When it fills the same area again, two turns later, it has seen all
ranks begin the turn in between, and a rank begins that only after it has finished with this area.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from typing import Any

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import as_blocks, reduce_into
from horovod.transport.division import block_bytes, pieces, share


class AreaReducer:
    """Does one rank's share of reductions through these areas.

    Args:
        rank: Our rank.
        memories: All ranks' segments.
        addresses: The addresses at which they are mapped.
        offset: The offset of the two areas in each segment.
        nbytes: The size of one area.
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
        self._cached_views: dict[torch.dtype, tuple[list[tuple[Any, Any]], Any]] = {}
        self._area = 0  # the one that was filled last

    def fill(self, tensors: Sequence[torch.Tensor], start: int = 0) -> int:
        """Copy the tensors, from element `start` on, into our next area, as far as they fit.

        Returns:
            The number of that area, 0 or 1.
        """
        self._area ^= 1
        target, width = self._addresses[self.rank][self._area], tensors[0].element_size()
        if len(tensors) == 1:
            skipped = start * width
            nbytes = min(tensors[0].nbytes - skipped, self.nbytes)
            memmove(target, tensors[0].data_ptr() + skipped, nbytes)
        else:
            for address, nbytes in _spans(tensors, width, start, start + self.nbytes // width):
                memmove(target, address, nbytes)
                target += nbytes
        return self._area

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        areas: Sequence[int],
        op: ReduceOp,
        scale: float,
        step: Callable[[], None],
    ) -> None:
        """Reduce tensors, the beginning of which all ranks have filled into an area.

        Args:
            tensors: The tensors, which are reduced in place.
            areas: The area that each rank has filled.
            op: SUM, MIN, MAX or PRODUCT.
            scale: The factor for the result.
            step: A function that lets the ranks take a step together.
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
                    target = tensors[0].data_ptr() + (start + lo) * width
                    memmove(target, source, (hi - lo) * width)
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
        """Reduce our share into our own area: no other rank reads that part before the step."""
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
        """Return both areas of every rank, and scratch memory, as operands of arithmetic."""
        cached = self._cached_views.get(dtype)
        if cached is None:
            count = self.nbytes // dtype.itemsize

            def view(memory: Any, area: int) -> Any:
                at = self._offset + area * self.nbytes
                return as_blocks(torch.frombuffer(memory, dtype=dtype, count=count, offset=at))

            views = [(view(memory, 0), view(memory, 1)) for memory in self._memories]
            cached = self._cached_views[dtype] = views, as_blocks(self._scratch.view(dtype))
        return cached


def _spans(
    tensors: Sequence[torch.Tensor], width: int, start: int, stop: int
) -> list[tuple[int, int]]:
    """Return address and bytes of each piece of the tensors' elements `start` to `stop`."""
    counts = [tensor.numel() for tensor in tensors]
    return [
        (tensors[number].data_ptr() + first * width, count * width)
        for number, first, count in pieces(counts, start, stop)
    ]
