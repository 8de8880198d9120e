"""Reducing tensors that stay where they are, in the memory of the processes of one host.

Each rank reads its share of everybody's tensors block by block, reduces it while it is in cache,
and pushes the result into everybody's tensors. Used by the shared-memory transport, which lets
ranks begin and end together.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import as_blocks, combination, needs_wide
from horovod.transport.peer_memory import PeerMemory
from horovod.transport.spans import SPAN, Layout, block_bytes, share

_KEPT = 256  # layouts, blocks of tensors, and places in scratch memory, that are remembered

Fetch = Callable[[int, int], None]  # (rank, address): copy that rank's block to the address


class PeerReducer:
    """One rank's side of such reductions. `peers` are all ranks, this one included."""

    def __init__(self, rank: int, peers: Sequence[PeerMemory]) -> None:
        self.rank = rank
        self.size = len(peers)
        self._peers = peers
        # Each rank begins with another peer: they would be in each other's way.
        self._others = [(rank + distance) % self.size for distance in range(1, self.size)]
        self._block = block_bytes(self.size)
        self._scratch = torch.empty(self.size * self._block, dtype=torch.uint8)
        self._areas: dict[tuple[torch.dtype, int, int], tuple[Any, int]] = {}
        self._layouts: OrderedDict[tuple[Any, ...], Layout] = OrderedDict()
        self._pairs: dict[tuple[int, int, torch.dtype], list[tuple[Any, Any, int, int, int]]] = {}

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        pointers: Sequence[np.ndarray[Any, Any]],
        op: ReduceOp,
        scale: float,
        check: Callable[[], None],
    ) -> None:
        """Reduce our share of `tensors` for everybody; `pointers` of each rank say where they are.

        `check` is called before every write to the others, and raises if one has failed: what is
        at its addresses may be something else by then.
        """
        layout = self._layout(tensors)
        for rank, places in enumerate(pointers):
            layout.place(rank, places)
        dtype, peers, tables = tensors[0].dtype, self._peers, layout.tables
        addresses, lengths = layout.addresses(self.rank), layout.lengths
        array: Any = None  # the tensor that we are at, as what arithmetic takes
        number = -1
        for block in layout.blocks:
            first, spans, nbytes = block.first, block.spans, block.elements * dtype.itemsize
            if spans == 1:
                if block.tensor != number:
                    number = block.tensor
                    array = as_blocks(tensors[number].view(-1))
                own, address = array[block.start : block.start + block.elements], addresses[first]
            else:
                own, address = self._area(dtype, self.rank, block.elements)
                to = address
                for span in range(first, first + spans):
                    ctypes.memmove(to, addresses[span], lengths[span])
                    to += lengths[span]
            at = SPAN * first

            def fetch(
                rank: int, to: int, at: int = at, nbytes: int = nbytes, spans: int = spans
            ) -> None:
                peers[rank].read_spans(to, nbytes, tables[rank] + at, spans)

            self._reduce_block(own, own, block.elements, dtype, op, fetch)
            if scale != 1.0:
                own *= scale
            check()
            for rank in self._others:
                peers[rank].write_spans(address, nbytes, tables[rank] + at, spans)
            if spans > 1:
                for span in range(first, first + spans):
                    ctypes.memmove(addresses[span], address, lengths[span])
                    address += lengths[span]

    def allreduce_pair(
        self, tensor: torch.Tensor, away: int, op: ReduceOp, scale: float, check: Callable[[], None]
    ) -> None:
        """The same for one flat tensor and two ranks, in fewer steps of Python.

        `away`: what is to be added to an address in our tensor to have the other's.
        """
        peer = self._peers[1 - self.rank]
        for own, operand, scratch, here, nbytes in self._pair_blocks(tensor):
            peer.read(scratch, here + away, nbytes)
            combination(own, op)(own, operand, out=own)
            if scale != 1.0:
                own *= scale
            check()
            peer.write(here, here + away, nbytes)

    def _pair_blocks(self, tensor: torch.Tensor) -> list[tuple[Any, Any, int, int, int]]:
        """The blocks of our share: ours, a place for the other's and its address, our address and
        bytes.

        They are remembered by where the tensor is, and do not keep it alive: whoever looks them up
        has it.
        """
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        known = self._pairs.get(key)
        if known is not None:
            return known
        base, count, dtype = key
        array, width, most = as_blocks(tensor), dtype.itemsize, self._block // dtype.itemsize
        passing = isinstance(array, np.ndarray)
        if passing:  # only numpy has arrays that own nothing
            memory = (ctypes.c_byte * (count * width)).from_address(base)
            array = np.frombuffer(memoryview(memory), array.dtype)
        blocks = []
        lo, hi = share(count, width, self.rank, 2)
        for start in range(lo, hi, most):
            part = min(most, hi - start)
            operand, scratch = self._area(dtype, 0, part)
            own = array[start : start + part]
            blocks.append((own, operand, scratch, base + start * width, part * width))
        if passing:
            if len(self._pairs) >= _KEPT:
                self._pairs.clear()
            self._pairs[key] = blocks
        return blocks

    def reduce_scatter(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        start: int,
        pointers: Sequence[int],
        op: ReduceOp,
    ) -> None:
        """output = everybody's elements from `start` on."""
        dtype = source.dtype
        most = self._block // dtype.itemsize
        own, target = as_blocks(source), as_blocks(output)
        for begin in range(0, output.numel(), most):
            count = min(most, output.numel() - begin)
            first, nbytes = start + begin, count * dtype.itemsize

            def fetch(
                rank: int, to: int, at: int = first * dtype.itemsize, nbytes: int = nbytes
            ) -> None:
                self._peers[rank].read(to, pointers[rank] + at, nbytes)

            mine, result = own[first : first + count], target[begin : begin + count]
            self._reduce_block(mine, result, count, dtype, op, fetch)

    def _reduce_block(
        self, own: Any, output: Any, count: int, dtype: torch.dtype, op: ReduceOp, fetch: Fetch
    ) -> None:
        """output = everybody's block; `own` is this rank's, and may be the output."""
        combine = combination(own, op)
        operands: list[Any] = [own] * self.size
        for rank in self._others:
            operands[rank], address = self._area(dtype, rank, count)
            fetch(rank, address)
        if needs_wide(dtype, op, self.size):
            total = operands[0].float()
            for operand in operands[1:]:
                combine(total, operand, out=total)
            output.copy_(total)
            return
        total = operands[0]
        for rank, operand in enumerate(operands[1:], 1):
            # Partial sums stay in scratch memory until our own block has been used.
            target = output if rank >= self.rank else total
            combine(total, operand, out=target)
            total = target

    def _layout(self, tensors: Sequence[torch.Tensor]) -> Layout:
        width = tensors[0].element_size()
        counts = tuple([tensor.numel() for tensor in tensors])
        key = (width, counts)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _KEPT:
                self._layouts.popitem(last=False)
            layout = self._layouts[key] = Layout(counts, width, self.rank, self.size)
        return layout

    def _area(self, dtype: torch.dtype, number: int, count: int) -> tuple[Any, int]:
        """A place in scratch memory for `count` elements, and its address; one for each rank."""
        key = (dtype, number, count)
        known = self._areas.get(key)
        if known is None:
            if len(self._areas) >= _KEPT:
                self._areas.clear()
            view = self._scratch[number * self._block :].view(dtype)[:count]
            known = self._areas[key] = as_blocks(view), view.data_ptr()
        return known
