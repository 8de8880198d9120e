"""Collectives among the ranks of one host through shared memory.

Ranks show each other their tensors in slots of shared memory (see `exchange`). There are three ways
to move data, by size:

- small tensors travel in the exchange slot itself: one step, and every rank reads all slots.
- larger tensors are read from and written to the peers' own memory with one copy (`peer_memory`):
  for allreduce each rank reads its share of every rank's tensor block by block, reduces it while it
  is in cache, and pushes the result into every rank's tensor (`peer_reduction`). Two steps in all.
- where the kernel forbids that, tensors go through the staging areas (`staging`). Reductions of
  medium size among more than two ranks go there too, because each copy by the kernel has a fixed
  overhead, which is paid once for each peer.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import (
    BoundedCache,
    arrays_at,
    as_blocks,
    ignore_overflow,
    reduce_into,
)
from horovod.transport.base import SHARED_MEMORY, WORD, Group
from horovod.transport.host.exchange import (
    INLINE,
    PAYLOAD_AT,
    STAGE,
    STAGES_AT,
    WORDS_AT,
    ExchangeTransport,
)
from horovod.transport.host.peer_memory import PeerMemory, allow_peers
from horovod.transport.host.peer_reduction import OtherHosts, PeerReducer
from horovod.transport.host.steps import STATE


class SharedMemoryTransport(ExchangeTransport):
    """The transport of ranks on one host. Raises `SharedMemoryUnavailable` when it cannot be."""

    name = "SHM"
    media = (SHARED_MEMORY,)
    vectored = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._peers = [PeerMemory(member.pid) for member in self._members]
        self._reducer = PeerReducer(self.rank, self._peers)
        self._sums = torch.empty(INLINE, dtype=torch.uint8)  # sums of several small tensors
        self._sum_views: BoundedCache[tuple[torch.dtype, int], Any] = BoundedCache()
        self.peer_memory = self._try_peer_memory(group.config.shm_peer_memory)
        self.algorithms = ("direct", "staged") if self.peer_memory else ()
        self._has_formed = True

    # -- reductions ------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        self.allreduce_vector([tensor], op)

    @ignore_overflow
    def allreduce_vector(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float = 1.0,
        wire: torch.dtype | None = None,
    ) -> None:
        self.check_usable()
        try:
            if self._preloaded is tensors:
                slot = self._slot
            else:
                slot = self._expose(tensors, reduced=True)
            self._preloaded = None
            is_single = len(tensors) == 1
            nbytes = tensors[0].nbytes if is_single else sum(self._tensor_bytes)
            if nbytes <= self._inline:
                self._allreduce_inline(tensors, op, scale, slot)
            elif self._is_staged(nbytes):
                areas = [words[slot // WORD] for words in self._words]
                self._stager.allreduce(tensors, areas, op, scale, self._step_together)
            else:
                if is_single and self.size == 2:
                    distance = self._words[self._others[0]][slot // WORD] - tensors[0].data_ptr()
                    check = self._check_others
                    self._reducer.allreduce_pair(tensors[0], distance, op, scale, check)
                else:
                    pointers = self._pointers(slot, len(tensors))
                    self._reducer.allreduce(tensors, pointers, op, scale, self._check_others)
                self._step_together()
        except BaseException as error:
            self._fail(error, self._at_risk(tensors), self._exposed_step)
            raise

    @ignore_overflow
    def allreduce_around(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp, others: OtherHosts
    ) -> None:
        """Reduce tensors that are larger than INLINE together with ranks on other hosts.

        Args:
            tensors: The tensors, which are reduced in place.
            op: SUM, MIN, MAX or PRODUCT.
            others: The ranks on other hosts, see `peer_reduction`.
        """
        self.check_usable()
        try:
            slot = self._expose(tensors)
            self._preloaded = None
            pointers = self._pointers(slot, len(tensors))
            self._reducer.allreduce_around(tensors, pointers, op, self._check_others, others)
            self._step_together()
        except BaseException as error:
            self._fail(error, tensors, self._exposed_step)
            raise

    def use(self, algorithm: str) -> None:
        self.peer_memory = algorithm == "direct"

    def _allreduce_inline(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp, scale: float, slot: int
    ) -> None:
        """Reduce what has travelled in the slots."""
        dtype, is_single = tensors[0].dtype, len(tensors) == 1
        count = tensors[0].numel() if is_single else sum(self._tensor_bytes) // dtype.itemsize
        if not count:
            return
        blocks = self._inline_blocks(slot, dtype, count)
        if is_single:
            result = self._operand(tensors[0])
        else:
            result = self._sum_views.get((dtype, count))
            if result is None:
                result = self._sum_views[dtype, count] = as_blocks(self._sums.view(dtype)[:count])
        reduce_into(result, blocks, op)
        if scale != 1.0:
            result *= scale
        if not is_single:
            source = self._sums.data_ptr()
            for address, size in zip(self._tensor_addresses, self._tensor_bytes, strict=True):
                ctypes.memmove(address, source, size)
                source += size

    def _operand(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as an operand of arithmetic."""
        arrays = arrays_at(tensor.dtype, (tensor.data_ptr(),), (tensor.numel(),))
        return as_blocks(tensor) if arrays is None else arrays[0]

    def _check_others(self) -> None:
        """Raise if another rank has failed or left."""
        for control in self._other_control:
            if control[STATE]:
                self._check_states(())

    @ignore_overflow
    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        with self._guard():
            slot = self._expose([source])
            self._preloaded = None
            lo = sum(counts[: self.rank])
            hi = lo + counts[self.rank]
            if source.nbytes <= self._inline:
                if hi > lo:
                    blocks = self._inline_blocks(slot, source.dtype, source.numel())
                    reduce_into(as_blocks(output), [block[lo:hi] for block in blocks], op)
            elif self.peer_memory:
                self._reducer.reduce_scatter(source, output, lo, self._exposed(slot).pointers, op)
                self._step_together()
            else:
                for area, start, count in self._staged_chunks(source.numel(), source.dtype):
                    area[self.rank][:count].copy_(source[start : start + count])
                    self._step_together()
                    first, last = max(lo, start), min(hi, start + count)
                    if first < last:
                        parts = [view[first - start : last - start] for view in area]
                        reduce_into(output[first - lo : last - lo], parts, op)
                self._step_together()

    def _staged_chunks(
        self, count: int, dtype: torch.dtype
    ) -> Iterator[tuple[list[torch.Tensor], int, int]]:
        """Yield the staging areas of all ranks, and the start and count of the piece for them.

        The two areas of a rank alternate, see `staging`.
        """
        room = STAGE // dtype.itemsize
        areas = [
            [
                torch.frombuffer(memory, dtype=dtype, count=room, offset=STAGES_AT + half * STAGE)
                for memory in self._memories
            ]
            for half in (0, 1)
        ]
        for index, start in enumerate(range(0, count, room)):
            yield areas[index & 1], start, min(room, count - start)

    # -- moving ----------------------------------------------------------------------------

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        with self._guard():
            slot = self._expose([source])
            width, at = source.element_size(), output.data_ptr()
            reads = []
            for rank, count in enumerate(counts):
                reads.append((rank, 0, at, count * width))
                at += count * width
            self._pull(slot, source, reads)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        with self._guard():
            source = tensor if self.rank == root else tensor[:0]
            slot = self._expose([source])
            reads = []
            if self.rank != root:
                reads.append((root, 0, tensor.data_ptr(), tensor.nbytes))
            self._pull(slot, source, reads)

    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        with self._guard():
            width, offsets, total = source.element_size(), [], 0
            for count in send_counts:
                offsets.append(total * width)
                total += count
            slot = self._expose([source], struct.pack(f"{self.size}Q", *offsets))
            mine = slot + WORDS_AT + self.rank * WORD  # the word that says where our slice is
            reads, at = [], output.data_ptr()
            for rank, count in enumerate(receive_counts):
                (offset,) = struct.unpack_from("Q", self._memories[rank], mine)
                reads.append((rank, offset, at, count * width))
                at += count * width
            self._pull(slot, source, reads)

    def _pull(
        self, slot: int, source: torch.Tensor, reads: Sequence[tuple[int, int, int, int]]
    ) -> None:
        """Copy parts of the tensors that all ranks exposed; this rank exposed `source`.

        `reads` has the rank of each part, the offset in its tensor, the address to copy to, and the
        bytes.
        """
        self._preloaded = None
        exposed = self._exposed(slot)
        largest = max(exposed.sizes)
        if largest > self._inline and not self.peer_memory:
            self._pull_staged(source, largest, reads)
            return
        for rank, offset, target, nbytes in reads:
            if nbytes == 0:
                continue
            if rank == self.rank:
                ctypes.memmove(target, source.data_ptr() + offset, nbytes)
            elif exposed.sizes[rank] <= self._inline:
                payload = self._addresses[rank] + slot + PAYLOAD_AT
                ctypes.memmove(target, payload + offset, nbytes)
            else:
                self._peers[rank].read(target, exposed.pointers[rank] + offset, nbytes)
        if largest > self._inline:
            self._step_together()  # nobody may change a tensor while others still read it

    def _pull_staged(
        self, source: torch.Tensor, largest: int, reads: Sequence[tuple[int, int, int, int]]
    ) -> None:
        """Do the reads of `_pull` through the staging areas; the largest tensor has `largest`."""
        for index, start in enumerate(range(0, largest, STAGE)):
            stage = STAGES_AT + (index & 1) * STAGE
            nbytes = min(STAGE, source.nbytes - start)
            if nbytes > 0:
                mine = self._addresses[self.rank] + stage
                ctypes.memmove(mine, source.data_ptr() + start, nbytes)
            self._step_together()
            for rank, offset, target, length in reads:
                first = max(offset, start)
                last = min(offset + length, start + STAGE)
                if first < last:
                    staged = self._addresses[rank] + stage + first - start
                    ctypes.memmove(target + first - offset, staged, last - first)
        self._step_together()

    def barrier(self) -> None:
        with self._guard():
            self._preloaded = None
            self._step_together()

    # -- peers' memory ---------------------------------------------------------------------

    def _try_peer_memory(self, wanted: bool) -> bool:
        """Return whether every rank can read and write every other's memory, by trying it."""
        with self._guard():
            if wanted:
                allow_peers(self._members[rank].pid for rank in self._others)
            # One word to be read (a secret of this process) and one that peers write into.
            secret = int.from_bytes(os.urandom(7), "little")
            probe = torch.tensor([secret] + [0] * self.size, dtype=torch.int64)
            slot = self._expose([probe])  # small, so also inline: what a true read must show
            works = wanted
            shown = self._inline_blocks(slot, torch.int64, 1 + self.size)
            pointers = self._exposed(slot).pointers
            seen = torch.zeros(1, dtype=torch.int64)
            try:
                for rank in self._others if works else ():
                    self._peers[rank].read(seen.data_ptr(), pointers[rank], WORD)
                    if int(seen) != int(shown[rank][0]):
                        raise OSError("read the memory of another process")
                    self._peers[rank].write(
                        seen.data_ptr(), pointers[rank] + (1 + self.rank) * WORD, WORD
                    )
            except OSError:
                works = False
            self._step_together()
            for rank in self._others:
                works = works and int(probe[1 + rank]) == secret
            slot = self._expose([torch.tensor([int(works)])])
            return all(int(block[0]) for block in self._inline_blocks(slot, torch.int64, 1))
