"""Collectives among the ranks of one host through shared memory.

Each rank owns a segment that all others map (see `segments`): a control page, by which ranks
advance in steps (see `steps`), two exchange slots and two staging areas. There are three ways to
move data, by size:

- little travels in the exchange slot itself: one step, every rank reads all slots. Two slots
  alternate, so no second step is needed before the next exchange: whoever writes slot k+2 has
  seen everybody publish k+1, that is, finish reading k.
- larger tensors are read from and written to the peers' own memory with one copy (`peer_memory`):
  for allreduce each rank reads its share of everybody's tensor block by block, reduces it while it
  is in cache, and pushes the result into everybody's tensor. Two steps in all.
- where the kernel forbids that, they are staged chunk by chunk through the staging areas.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import as_blocks, reduce_into
from horovod.transport.base import MAX_TENSORS, MAX_WORDS, WORD, Group
from horovod.transport.peer_memory import PeerMemory, allow_peers
from horovod.transport.pushing import PeerReducer
from horovod.transport.spans import share
from horovod.transport.steps import CONTROL, STATE, SteppedTransport

INLINE = 128 * 1024  # bytes of payload in an exchange slot
STAGE = 2 * 1024 * 1024  # bytes of one staging area

# Exchange slot: [pointer][nbytes][number of word bytes][words] [pointers] [payload]
_HEADER = 3 * WORD
_WORDS_AT = _HEADER
_POINTERS_AT = 8192
_PAYLOAD_AT = _POINTERS_AT + WORD * MAX_TENSORS
_SLOT = _PAYLOAD_AT + INLINE
_STAGES_AT = CONTROL + 2 * _SLOT
_SEGMENT = _STAGES_AT + 2 * STAGE
assert _WORDS_AT + WORD * MAX_WORDS <= _POINTERS_AT


class _Exposed(NamedTuple):
    """What the ranks showed each other in one exchange."""

    slot: int  # offset of the slot in every segment
    pointers: list[int]
    sizes: list[int]


class SharedMemoryTransport(SteppedTransport):
    """The transport of ranks on one host. Raises `SharedMemoryUnavailable` when it cannot be."""

    name = "SHM"

    def __init__(self, group: Group) -> None:
        super().__init__(group, _SEGMENT)
        self._words = [memoryview(memory).cast("Q") for memory in self._memories]
        self._addresses = [
            ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self._memories
        ]
        self._exchanges = 0
        self._exposed_at = 0
        self._slot = 0
        self._preloaded: Sequence[torch.Tensor] | None = None
        # Every rank reads all slots, so the more ranks, the less pays to be sent that way.
        self._inline = min(INLINE, 2 * INLINE // self.size)
        self._inline_known: dict[tuple[int, torch.dtype, int], list[Any]] = {}
        self._peers = [PeerMemory(member.pid) for member in self._members]
        self._reducer = PeerReducer(self.rank, self._peers)
        self._sums = torch.empty(INLINE, dtype=torch.uint8)
        self.peer_memory = self._try_peer_memory(group.config.shm_peer_memory)
        self.algorithms = ("direct", "staged") if self.peer_memory else ()
        self.vectored = self.peer_memory  # staged, tensors had better be one
        self._met = True

    # -- exchange --------------------------------------------------------------------------

    def _expose(self, tensors: Sequence[torch.Tensor], words: bytes = b"") -> int:
        """Show `words` and tensors to all ranks; returns the slot once everybody has done so."""
        self._exchanges += 1
        slot = CONTROL + (self._exchanges & 1) * _SLOT
        memory = self._memories[self.rank]
        pointer = nbytes = 0
        if len(tensors) == 1:
            pointer, nbytes = tensors[0].data_ptr(), tensors[0].nbytes
            if 0 < nbytes <= self._inline:
                ctypes.memmove(self._addresses[self.rank] + slot + _PAYLOAD_AT, pointer, nbytes)
        elif tensors:
            nbytes = sum([tensor.nbytes for tensor in tensors])
            if 0 < nbytes <= self._inline:
                at = self._addresses[self.rank] + slot + _PAYLOAD_AT
                for tensor in tensors:
                    ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
                    at += tensor.nbytes
            else:
                pointers = [tensor.data_ptr() for tensor in tensors]
                struct.pack_into(f"{len(pointers)}Q", memory, slot + _POINTERS_AT, *pointers)
        header = struct.pack("3Q", pointer, nbytes, len(words))
        memory[slot : slot + _HEADER + len(words)] = header + words
        self._exposed_at = step = self._publish()
        self._await(step)
        return slot

    def _exposed(self, slot: int) -> _Exposed:
        pointers, sizes = [], []
        for memory in self._memories:
            pointer, nbytes = struct.unpack_from("2Q", memory, slot)
            pointers.append(pointer)
            sizes.append(nbytes)
        return _Exposed(slot, pointers, sizes)

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        self._check_usable()
        try:
            self._preloaded = None
            self._slot = slot = self._expose(preload or (), words)
            start, stop = slot + 2 * WORD, slot + _HEADER + len(words)
            memories = self._memories
            mine = memories[self.rank][start:stop]
            for rank in self._others:
                if memories[rank][start:stop] != mine:
                    return self._common_words(slot)
            self._preloaded = preload
            return len(words) // WORD
        except BaseException as error:
            self._fail(error, self._at_risk(preload or ()), self._exposed_at)
            raise

    def _common_words(self, slot: int) -> int:
        everyone = []
        for memory in self._memories:
            (length,) = struct.unpack_from("Q", memory, slot + 2 * WORD)
            start = slot + _WORDS_AT
            everyone.append(bytes(memory[start : start + length]))
        common = min(len(words) for words in everyone) // WORD
        for index in range(common):
            at = slice(index * WORD, (index + 1) * WORD)
            if any(words[at] != everyone[0][at] for words in everyone):
                return index
        return common

    def _at_risk(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Those that peers write to: all, unless they travel in the slot."""
        return tensors if sum(tensor.nbytes for tensor in tensors) > self._inline else ()

    def _inline_blocks(self, slot: int, dtype: torch.dtype, count: int) -> list[Any]:
        """What every rank has put into its slot, as what arithmetic takes."""
        key = (slot, dtype, count)
        blocks = self._inline_known.get(key)
        if blocks is None:
            if len(self._inline_known) >= 256:
                self._inline_known.clear()
            offset = slot + _PAYLOAD_AT
            blocks = self._inline_known[key] = [
                as_blocks(torch.frombuffer(memory, dtype=dtype, count=count, offset=offset))
                for memory in self._memories
            ]
        return blocks

    # -- reductions ------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        self.allreduce_vector([tensor], op)

    def allreduce_vector(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp, scale: float = 1.0
    ) -> None:
        self._check_usable()
        try:
            slot = self._slot if self._preloaded is tensors else self._expose(tensors)
            self._preloaded = None
            if sum([tensor.nbytes for tensor in tensors]) <= self._inline:
                self._allreduce_inline(tensors, op, scale, slot)
            elif self.peer_memory:
                if self.size == 2 and len(tensors) == 1:
                    away = self._words[self._others[0]][slot // WORD] - tensors[0].data_ptr()
                    self._reducer.allreduce_pair(tensors[0], away, op, scale, self._check_others)
                else:
                    pointers = self._pointers(slot, len(tensors))
                    self._reducer.allreduce(tensors, pointers, op, scale, self._check_others)
                self._step_together()
            else:
                for tensor in tensors:
                    self._allreduce_staged(tensor, op, scale)
        except BaseException as error:
            self._fail(error, self._at_risk(tensors), self._exposed_at)
            raise

    def use(self, algorithm: str) -> None:
        self.peer_memory = self.vectored = algorithm == "direct"

    def _allreduce_inline(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp, scale: float, slot: int
    ) -> None:
        """Reduce what has travelled in the slots; of several tensors, one after the other."""
        dtype, sizes = tensors[0].dtype, [tensor.nbytes for tensor in tensors]
        count = sum(sizes) // dtype.itemsize
        if not count:
            return
        blocks = self._inline_blocks(slot, dtype, count)
        alone = len(tensors) == 1
        result = as_blocks(tensors[0]) if alone else as_blocks(self._sums.view(dtype)[:count])
        reduce_into(result, blocks, op)
        if scale != 1.0:
            result *= scale
        if not alone:
            at = self._sums.data_ptr()
            for tensor, nbytes in zip(tensors, sizes, strict=True):
                ctypes.memmove(tensor.data_ptr(), at, nbytes)
                at += nbytes

    def _pointers(self, slot: int, count: int) -> list[np.ndarray[Any, Any]]:
        """Where the tensors that were exposed are: their addresses on every rank."""
        at = slot + _POINTERS_AT if count > 1 else slot
        return [np.frombuffer(memory, np.uint64, count, at) for memory in self._memories]

    def _check_others(self) -> None:
        for control in self._other_control:
            if control[STATE]:
                self._check_states(())

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

    def _allreduce_staged(self, tensor: torch.Tensor, op: ReduceOp, scale: float) -> None:
        width = tensor.element_size()
        for area, start, count in self._staged_chunks(tensor.numel(), tensor.dtype):
            chunk = tensor[start : start + count]
            area[self.rank][:count].copy_(chunk)
            self._step_together()
            lo, hi = share(count, width, self.rank, self.size)
            if lo < hi:
                # Nobody else reads our area at our own share, so the result may go there.
                mine = area[self.rank][lo:hi]
                reduce_into(mine, [view[lo:hi] for view in area], op)
                if scale != 1.0:
                    mine.mul_(scale)
            self._step_together()
            for rank, view in enumerate(area):
                lo, hi = share(count, width, rank, self.size)
                chunk[lo:hi].copy_(view[lo:hi])
        self._step_together()

    def _staged_chunks(
        self, count: int, dtype: torch.dtype
    ) -> Iterator[tuple[list[torch.Tensor], int, int]]:
        """The staging areas of all ranks, alternating, with the piece they are to hold."""
        room = STAGE // dtype.itemsize
        areas = [
            [
                torch.frombuffer(memory, dtype=dtype, count=room, offset=_STAGES_AT + half * STAGE)
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
            mine = slot + _WORDS_AT + self.rank * WORD  # where a rank's words say our slice is
            reads, at = [], output.data_ptr()
            for rank, count in enumerate(receive_counts):
                (offset,) = struct.unpack_from("Q", self._memories[rank], mine)
                reads.append((rank, offset, at, count * width))
                at += count * width
            self._pull(slot, source, reads)

    def _pull(
        self, slot: int, source: torch.Tensor, reads: Sequence[tuple[int, int, int, int]]
    ) -> None:
        """Do all reads (rank, offset in its source, to address, bytes) of what was exposed."""
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
                place = self._addresses[rank] + slot + _PAYLOAD_AT
                ctypes.memmove(target, place + offset, nbytes)
            else:
                self._peers[rank].read(target, exposed.pointers[rank] + offset, nbytes)
        if largest > self._inline:
            self._step_together()

    def _pull_staged(
        self, source: torch.Tensor, largest: int, reads: Sequence[tuple[int, int, int, int]]
    ) -> None:
        for index, start in enumerate(range(0, largest, STAGE)):
            stage = _STAGES_AT + (index & 1) * STAGE
            nbytes = min(STAGE, source.nbytes - start)
            if nbytes > 0:
                mine = self._addresses[self.rank] + stage
                ctypes.memmove(mine, source.data_ptr() + start, nbytes)
            self._step_together()
            for rank, offset, target, length in reads:
                first = max(offset, start)
                last = min(offset + length, start + STAGE)
                if first < last:
                    place = self._addresses[rank] + stage + first - start
                    ctypes.memmove(target + first - offset, place, last - first)
        self._step_together()

    def barrier(self) -> None:
        with self._guard():
            self._preloaded = None
            self._step_together()

    # -- peers' memory ---------------------------------------------------------------------

    def _try_peer_memory(self, wanted: bool) -> bool:
        """Whether every rank can read and write every other's memory, found by doing it."""
        with self._guard():
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
