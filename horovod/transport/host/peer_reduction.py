"""Reducing tensors where they are, in the private memory of the processes of one host.

Each rank reads its share of all ranks' tensors block by block, reduces it while it is in cache, and
pushes the result into all ranks' tensors. Used by the shared-memory transport, which lets ranks
begin and end together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import BoundedCache, arrays_at, as_blocks, combination, needs_wide
from horovod.transport.base import Transport
from horovod.transport.division import SPAN, Block, Layout, block_bytes, share
from horovod.transport.host.peer_memory import PeerMemory

PIECE = 1024 * 1024  # bytes of a share that travel between hosts at a time


class _Scratch(NamedTuple):
    """Scratch memory for one block of every rank, with the spans of a rank end to end.

    Ours stays unused, because our own tensors are read where they are.
    """

    operands: list[Any]  # the memory for each rank
    addresses: list[int]  # its address
    partial: list[Any]  # the spans of the first rank that is not ours, where results add up
    last: list[Any]  # the spans of the last rank


class _Plan(NamedTuple):
    """What follows from the sizes of tensors, wherever they are."""

    layout: Layout
    scratch: list[_Scratch]  # for each block


class OtherHosts:
    """The ranks on other hosts that have the same share as this rank.

    Args:
        cross: The transport that connects this rank with them.
        arguments: The operation, the scale and the wire type of the reduction.
        explain: A function that turns an error of `cross` into one for the host's transport.
    """

    def __init__(
        self,
        cross: Transport,
        arguments: tuple[ReduceOp, float, torch.dtype | None],
        explain: Callable[[HorovodInternalError], HorovodInternalError],
    ) -> None:
        self._cross, self._arguments, self._explain = cross, arguments, explain

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to reduce with the other hosts."""
        try:
            self._cross.begin_allreduce(tensors, *self._arguments)
        except HorovodInternalError as error:
            raise self._explain(error) from error

    def finish(self) -> None:
        """Wait until the reduction that was begun is done."""
        try:
            self._cross.finish_allreduce()
        except HorovodInternalError as error:
            raise self._explain(error) from error


class PeerReducer:
    """Does one rank's share of reductions. `peers` are all ranks, this one included."""

    def __init__(self, rank: int, peers: Sequence[PeerMemory]) -> None:
        self.rank = rank
        self.size = len(peers)
        self._peers = peers
        # Start at different peers to avoid contention.
        self._others = [(rank + distance) % self.size for distance in range(1, self.size)]
        self._block = block_bytes(self.size)
        self._scratch = torch.empty(self.size * self._block, dtype=torch.uint8)
        self._areas: BoundedCache[tuple[torch.dtype, int, int], tuple[Any, int]] = BoundedCache()
        self._plans: BoundedCache[tuple[Any, ...], _Plan] = BoundedCache()
        self._pairs: BoundedCache[
            tuple[int, int, torch.dtype], list[tuple[Any, Any, int, int, int]]
        ] = BoundedCache()

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        pointers: Sequence[Sequence[int]],
        op: ReduceOp,
        scale: float,
        check: Callable[[], None],
    ) -> None:
        """Reduce our share of tensors, for all ranks.

        Args:
            tensors: Our tensors.
            pointers: The addresses of the tensors, of each rank.
            op: SUM, MIN, MAX or PRODUCT.
            scale: The factor for the result.
            check: A function that is called before every write to the other ranks. It raises if one
                of them has failed: something else may be at its addresses by then.
        """
        layout, scratches = self._plan(tensors)
        addresses = [layout.locate(rank, tensors_at) for rank, tensors_at in enumerate(pointers)]
        peers, tables, width = self._peers, layout.tables, tensors[0].dtype.itemsize
        ours, own = tables[self.rank], self._own(layout, tensors, addresses[self.rank])
        for (first, count, elements), scratch in zip(layout.blocks, scratches, strict=True):
            at, nbytes, mine = SPAN * first, elements * width, own[first : first + count]
            for rank in self._others:
                peers[rank].read_spans(scratch.addresses[rank], nbytes, tables[rank] + at, count)
            self._reduce_block(mine, mine, scratch, op)
            if scale != 1.0:
                for part in mine:
                    part *= scale
            check()
            for rank in self._others:
                peers[rank].write_spans(ours + at, nbytes, tables[rank] + at, count)

    def allreduce_around(
        self,
        tensors: Sequence[torch.Tensor],
        pointers: Sequence[Sequence[int]],
        op: ReduceOp,
        check: Callable[[], None],
        others: OtherHosts,
    ) -> None:
        """Reduce our share of tensors like `allreduce`, together with ranks on other hosts.

        `others` reduces our share, in pieces, with theirs. While a piece travels between hosts, the
        next one is reduced here, and the one before it is pushed to the ranks of this host.
        """
        layout, scratches = self._plan(tensors)
        addresses = [layout.locate(rank, tensors_at) for rank, tensors_at in enumerate(pointers)]
        peers, tables, width = self._peers, layout.tables, tensors[0].dtype.itemsize
        ours, own = tables[self.rank], self._own(layout, tensors, addresses[self.rank])

        def push(blocks: Sequence[Block]) -> None:
            check()
            for first, count, elements in blocks:
                at = SPAN * first
                for rank in self._others:
                    peers[rank].write_spans(ours + at, elements * width, tables[rank] + at, count)

        before: Sequence[Block] = ()
        for start, stop in _pieces(layout.blocks, PIECE // width):
            blocks = layout.blocks[start:stop]
            for (first, count, elements), scratch in zip(
                blocks, scratches[start:stop], strict=True
            ):
                at, nbytes, mine = SPAN * first, elements * width, own[first : first + count]
                for rank in self._others:
                    target = scratch.addresses[rank]
                    peers[rank].read_spans(target, nbytes, tables[rank] + at, count)
                self._reduce_block(mine, mine, scratch, op)
            if before:
                others.finish()
            spans = layout.spans[blocks[0].first : blocks[-1].first + blocks[-1].spans]
            others.begin([tensors[number].view(-1)[at : at + count] for number, at, count in spans])
            push(before)
            before = blocks
        if before:
            others.finish()
            push(before)

    def _own(
        self, layout: Layout, tensors: Sequence[torch.Tensor], addresses: Sequence[int]
    ) -> list[Any]:
        """Return our spans, as operands of arithmetic."""
        arrays = arrays_at(tensors[0].dtype, addresses, layout.counts)
        if arrays is not None:
            return arrays
        whole = [as_blocks(tensor.view(-1)) for tensor in tensors]
        return [whole[tensor][start : start + count] for tensor, start, count in layout.spans]

    def allreduce_pair(
        self,
        tensor: torch.Tensor,
        distance: int,
        op: ReduceOp,
        scale: float,
        check: Callable[[], None],
    ) -> None:
        """Do `allreduce` for one flat tensor and two ranks, in fewer steps of Python.

        `distance` is the address of the other rank's tensor minus that of ours.
        """
        peer = self._peers[1 - self.rank]
        for own, operand, scratch, address, nbytes in self._pair_blocks(tensor):
            peer.read(scratch, address + distance, nbytes)
            combination(own, op)(own, operand, out=own)
            if scale != 1.0:
                own *= scale
            check()
            peer.write(address, address + distance, nbytes)

    def _pair_blocks(self, tensor: torch.Tensor) -> list[tuple[Any, Any, int, int, int]]:
        """Return the blocks of our share of a tensor of two ranks.

        Each is our operand, scratch memory for the other's operand and the address of that memory,
        the address of our operand, and its bytes. Blocks are remembered by the tensor's address,
        and do not keep it alive: a caller that looks them up has the tensor.
        """
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        cached = self._pairs.get(key)
        if cached is not None:
            return cached
        base, count, dtype = key
        width, most = dtype.itemsize, self._block // dtype.itemsize
        lo, hi = share(count, width, self.rank, 2)
        starts = range(lo, hi, most)
        counts = [min(most, hi - start) for start in starts]
        addresses = [base + start * width for start in starts]
        arrays = arrays_at(dtype, addresses, counts)
        own: list[Any] | None = arrays
        if own is None:
            whole = as_blocks(tensor)
            own = [whole[start : start + part] for start, part in zip(starts, counts, strict=True)]
        blocks = [
            (array, *self._area(dtype, 0, part), address, part * width)
            for array, part, address in zip(own, counts, addresses, strict=True)
        ]
        if arrays is not None:
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
        """Reduce the elements of all ranks from `start` on into `output`."""
        dtype = source.dtype
        width, most = dtype.itemsize, self._block // dtype.itemsize
        own, target = as_blocks(source), as_blocks(output)
        for begin in range(0, output.numel(), most):
            count = min(most, output.numel() - begin)
            first = start + begin
            scratch = self._scratch_for(dtype, [count])
            for rank in self._others:
                remote = pointers[rank] + first * width
                self._peers[rank].read(scratch.addresses[rank], remote, count * width)
            mine, result = own[first : first + count], target[begin : begin + count]
            self._reduce_block([mine], [result], scratch, op)

    def _reduce_block(
        self, own: Sequence[Any], outputs: Sequence[Any], scratch: _Scratch, op: ReduceOp
    ) -> None:
        """Combine the spans of all ranks, in rank order, into `outputs`; `own` may be these."""
        operands, _, partial, last = scratch
        combine = combination(own[0], op)
        if needs_wide(own[0].dtype, op, self.size):
            _reduce_wide(own, outputs, operands, self.rank, combine)
            return
        before, after = operands[: self.rank], operands[self.rank + 1 :]
        for operand in before[1:]:
            combine(before[0], operand, out=before[0])
        # Partial results stay in scratch memory until our own spans have been used.
        targets = partial if self.size > 2 and after else outputs
        for part, mine, target in zip(partial, own, targets, strict=True):
            if before:
                combine(part, mine, out=target)
            else:
                combine(mine, part, out=target)
        total = before[0] if before else after.pop(0)
        for operand in after[:-1]:
            combine(total, operand, out=total)
        if after:
            for part, other, output in zip(partial, last, outputs, strict=True):
                combine(part, other, out=output)

    def _plan(self, tensors: Sequence[torch.Tensor]) -> _Plan:
        """Return the plan for tensors of these sizes, which is made once."""
        dtype, counts = tensors[0].dtype, tuple([tensor.numel() for tensor in tensors])
        plan = self._plans.get((dtype, counts))
        if plan is None:
            layout = Layout(counts, dtype.itemsize, self.rank, self.size)
            scratch = [
                self._scratch_for(dtype, layout.counts[block.first : block.first + block.spans])
                for block in layout.blocks
            ]
            plan = self._plans[dtype, counts] = _Plan(layout, scratch)
        return plan

    def _scratch_for(self, dtype: torch.dtype, counts: Sequence[int]) -> _Scratch:
        """Return scratch memory for a block whose spans have these numbers of elements."""
        areas = [self._area(dtype, rank, sum(counts)) for rank in range(self.size)]
        edges = list(pairwise([0, *accumulate(counts)]))
        first = areas[0 if self.rank else 1][0]
        return _Scratch(
            [area for area, _ in areas],
            [address for _, address in areas],
            [first[start:stop] for start, stop in edges],
            [areas[-1][0][start:stop] for start, stop in edges],
        )

    def _area(self, dtype: torch.dtype, number: int, count: int) -> tuple[Any, int]:
        """Return area `number` of scratch memory, for `count` elements, and its address.

        There is one area for each rank.
        """
        key = (dtype, number, count)
        cached = self._areas.get(key)
        if cached is None:
            view = self._scratch[number * self._block :].view(dtype)[:count]
            cached = self._areas[key] = as_blocks(view), view.data_ptr()
        return cached


def _pieces(blocks: Sequence[Block], elements: int) -> list[tuple[int, int]]:
    """Group consecutive blocks into pieces of at least `elements`; return their first and end."""
    edges, taken = [0], 0
    for number, block in enumerate(blocks):
        taken += block.elements
        if taken >= elements:
            edges.append(number + 1)
            taken = 0
    if edges[-1] != len(blocks):
        edges.append(len(blocks))
    return list(pairwise(edges))


def _reduce_wide(
    own: Sequence[Any],
    outputs: Sequence[Any],
    others: Sequence[Any],
    rank: int,
    combine: Callable[..., Any],
) -> None:
    """Reduce half precision in float32, and round the result once."""
    operands = [*others[:rank], torch.cat(list(own)), *others[rank + 1 :]]
    total = operands[0].float()
    for operand in operands[1:]:
        combine(total, operand, out=total)
    parts = total.split([len(output) for output in outputs])
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part)
