"""Collectives among the ranks of one host through shared memory.

Each rank owns a segment that all others map (see `segments`): a control page, by which ranks
advance in steps (see `steps`), two exchange slots and two staging areas. There are three ways to
move data, by size:

- little travels in the exchange slot itself: one step, every rank reads all slots. Two slots
  alternate, so no second step is needed before the next exchange: whoever writes slot k+2 has
  seen everybody publish k+1, that is, finish reading k.
- larger tensors are read from and written to the peers' own memory with one copy (`peer_memory`):
  for allreduce each rank reads its share of everybody's tensor block by block, reduces it while it
  is in cache, and pushes the result into everybody's tensor (`peer_reduction`). Two steps in all.
- where the kernel forbids that they go through the staging areas (`staging`), and so do reductions
  of medium size among more than two ranks: each kernel copy has a fixed overhead, paid once per
  peer.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport import address_arrays
from horovod.transport.arithmetic import as_blocks, quietly, reduce_into
from horovod.transport.base import MAX_TENSORS, MAX_WORDS, SHARED_MEMORY, WORD, Group
from horovod.transport.peer_memory import PeerMemory, allow_peers
from horovod.transport.peer_reduction import Others, PeerReducer
from horovod.transport.staging import AreaReducer
from horovod.transport.steps import CONTROL, STATE, SteppedTransport

INLINE = 128 * 1024  # bytes of payload in an exchange slot
STAGE = 2 * 1024 * 1024  # bytes of one staging area
_KEPT = 256  # views of memory of each kind that are remembered

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
    media = (SHARED_MEMORY,)

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
        self._places: list[int] = []  # of several tensors that were exposed last: their addresses,
        self._sizes: list[int] = []  # and their bytes
        # Every rank reads all slots, so the more ranks, the less pays to be sent that way.
        self._inline = min(INLINE, 2 * INLINE // self.size)
        self._inline_known: dict[tuple[int, torch.dtype, int], list[Any]] = {}
        self._peers = [PeerMemory(member.pid) for member in self._members]
        self._reducer = PeerReducer(self.rank, self._peers)
        self._stager = AreaReducer(self.rank, self._memories, self._addresses, _STAGES_AT, STAGE)
        # Measured on 16 cores: up to 300 KiB among 3 ranks, 500 among 4, 2 MiB and more among 8.
        self._staged_limit = 0 if self.size == 2 else min(STAGE, 32 * 1024 * self.size**2)
        self._sums = torch.empty(INLINE, dtype=torch.uint8)
        self._sums_known: dict[tuple[torch.dtype, int], Any] = {}
        self.peer_memory = self._try_peer_memory(group.config.shm_peer_memory)
        self.algorithms = ("direct", "staged") if self.peer_memory else ()
        self.vectored = True
        self._met = True

    # -- exchange --------------------------------------------------------------------------

    def _expose(
        self, tensors: Sequence[torch.Tensor], words: bytes = b"", reduced: bool = False
    ) -> int:
        """Show `words` and tensors to all ranks; returns the slot once everybody has done so.

        Instead of its address, the pointer of what is to be `reduced` may say in which staging area
        it is.
        """
        self._exchanges += 1
        slot = CONTROL + (self._exchanges & 1) * _SLOT
        memory = self._memories[self.rank]
        pointer = nbytes = 0
        if len(tensors) == 1:
            pointer, nbytes = tensors[0].data_ptr(), tensors[0].nbytes
            if 0 < nbytes <= self._inline:
                ctypes.memmove(self._addresses[self.rank] + slot + _PAYLOAD_AT, pointer, nbytes)
            elif reduced and self._is_staged(nbytes):
                pointer = self._stager.fill(tensors)
        elif tensors:
            self._sizes = sizes = [tensor.nbytes for tensor in tensors]
            self._places = places = [tensor.data_ptr() for tensor in tensors]
            nbytes = sum(sizes)
            if 0 < nbytes <= self._inline:
                at = self._addresses[self.rank] + slot + _PAYLOAD_AT
                for place, size in zip(places, sizes, strict=True):
                    ctypes.memmove(at, place, size)
                    at += size
            elif reduced and self._is_staged(nbytes):
                pointer = self._stager.fill(tensors)
            else:
                struct.pack_into(f"{len(places)}Q", memory, slot + _POINTERS_AT, *places)
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
        self.check_usable()
        try:
            self._preloaded = None
            self._slot = slot = self._expose(preload or (), words, reduced=True)
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

    def _is_staged(self, nbytes: int) -> bool:
        """Whether a reduction of so much, if it does not travel in the slot, is staged."""
        return nbytes <= self._staged_limit or not self.peer_memory

    def _at_risk(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Those that peers write to: all that are not copied somewhere else first."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return () if nbytes <= self._inline or self._is_staged(nbytes) else tensors

    def _inline_blocks(self, slot: int, dtype: torch.dtype, count: int) -> list[Any]:
        """What every rank has put into its slot, as what arithmetic takes."""
        key = (slot, dtype, count)
        blocks = self._inline_known.get(key)
        if blocks is None:
            if len(self._inline_known) >= _KEPT:
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

    @quietly
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
            alone = len(tensors) == 1
            nbytes = tensors[0].nbytes if alone else sum(self._sizes)
            if nbytes <= self._inline:
                self._allreduce_inline(tensors, op, scale, slot)
            elif self._is_staged(nbytes):
                areas = [words[slot // WORD] for words in self._words]
                self._stager.allreduce(tensors, areas, op, scale, self._step_together)
            else:
                if alone and self.size == 2:
                    away = self._words[self._others[0]][slot // WORD] - tensors[0].data_ptr()
                    self._reducer.allreduce_pair(tensors[0], away, op, scale, self._check_others)
                else:
                    pointers = self._pointers(slot, len(tensors))
                    self._reducer.allreduce(tensors, pointers, op, scale, self._check_others)
                self._step_together()
        except BaseException as error:
            self._fail(error, self._at_risk(tensors), self._exposed_at)
            raise

    @quietly
    def allreduce_around(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp, others: Others
    ) -> None:
        """Reduce tensors that are larger than INLINE, with `others` too: see `peer_reduction`."""
        self.check_usable()
        try:
            slot = self._expose(tensors)
            self._preloaded = None
            pointers = self._pointers(slot, len(tensors))
            self._reducer.allreduce_around(tensors, pointers, op, self._check_others, others)
            self._step_together()
        except BaseException as error:
            self._fail(error, tensors, self._exposed_at)
            raise

    def use(self, algorithm: str) -> None:
        self.peer_memory = algorithm == "direct"

    def _allreduce_inline(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp, scale: float, slot: int
    ) -> None:
        """Reduce what has travelled in the slots; of several tensors, one after the other."""
        dtype, alone = tensors[0].dtype, len(tensors) == 1
        count = tensors[0].numel() if alone else sum(self._sizes) // dtype.itemsize
        if not count:
            return
        blocks = self._inline_blocks(slot, dtype, count)
        if alone:
            result = self._own(tensors[0])
        else:
            result = self._sums_known.get((dtype, count))
            if result is None:
                if len(self._sums_known) >= _KEPT:
                    self._sums_known.clear()
                result = self._sums_known[dtype, count] = as_blocks(self._sums.view(dtype)[:count])
        reduce_into(result, blocks, op)
        if scale != 1.0:
            result *= scale
        if not alone:
            at = self._sums.data_ptr()
            for place, size in zip(self._places, self._sizes, strict=True):
                ctypes.memmove(place, at, size)
                at += size

    def _own(self, tensor: torch.Tensor) -> Any:
        """A tensor as what arithmetic takes."""
        arrays = address_arrays.arrays(tensor.dtype, (tensor.data_ptr(),), (tensor.numel(),))
        return as_blocks(tensor) if arrays is None else arrays[0]

    def _pointers(self, slot: int, count: int) -> list[Sequence[int]]:
        """Where the tensors that were exposed are: their addresses on every rank."""
        first = (slot + _POINTERS_AT if count > 1 else slot) // WORD
        return [words[first : first + count].tolist() for words in self._words]

    def _check_others(self) -> None:
        for control in self._other_control:
            if control[STATE]:
                self._check_states(())

    @quietly
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
