"""How the ranks of one host show each other words and tensors, in slots of shared memory.

Each rank owns a segment that all others map (see `segments`): a control page, by which ranks
advance in steps (see `steps`), two exchange slots and two staging areas (see `staging`). In one
exchange every rank fills its slot, takes a step, and then reads all slots. A slot has words to
agree on, and either the content of small tensors or the addresses of larger ones.

The two slots alternate. So one step for each exchange is enough, and nobody needs a lock: a rank
that writes slot k+2 has seen all ranks publish step k+1, and a rank publishes that only after it
has read slot k.

The shared-memory transport builds its collectives on this.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from horovod.transport.arithmetic import BoundedCache, as_blocks
from horovod.transport.base import MAX_TENSORS, MAX_WORDS, WORD, Group, count_common_words
from horovod.transport.host.staging import AreaReducer
from horovod.transport.host.steps import CONTROL, SteppedTransport

INLINE = 128 * 1024  # bytes of payload in an exchange slot
STAGE = 2 * 1024 * 1024  # bytes of one staging area

# An exchange slot: [pointer][nbytes][number of word bytes][words] [pointers] [payload]
_HEADER = 3 * WORD
WORDS_AT = _HEADER
_POINTERS_AT = 8192
PAYLOAD_AT = _POINTERS_AT + WORD * MAX_TENSORS
_SLOT = PAYLOAD_AT + INLINE
STAGES_AT = CONTROL + 2 * _SLOT
_SEGMENT = STAGES_AT + 2 * STAGE
assert WORDS_AT + WORD * MAX_WORDS <= _POINTERS_AT


class Exposed(NamedTuple):
    """The tensors that the ranks showed each other, one of each rank."""

    pointers: list[int]  # their addresses, by rank
    sizes: list[int]  # their bytes, by rank


class ExchangeTransport(SteppedTransport):
    """The exchange of words and tensors among the ranks of one host; subclasses add collectives.

    Raises `SharedMemoryUnavailable` when the ranks cannot share memory.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group, _SEGMENT)
        self.peer_memory = False  # whether ranks read and write each other's memory
        self._words = [memoryview(memory).cast("Q") for memory in self._memories]
        self._addresses = [  # where we have mapped each rank's segment
            ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self._memories
        ]
        self._exchanges = 0  # how many there were
        self._exposed_step = 0  # the step that ended the last one
        self._slot = 0  # the slot of the last `agree`
        self._preloaded: Sequence[torch.Tensor] | None = None  # the tensors that it has shown
        # The addresses and bytes of the tensors that were exposed last, if there were several.
        self._tensor_addresses: list[int] = []
        self._tensor_bytes: list[int] = []
        # Every rank reads all slots, so the more ranks there are, the less is worth sending so.
        self._inline = min(INLINE, 2 * INLINE // self.size)
        self._inline_views: BoundedCache[tuple[int, torch.dtype, int], list[Any]] = BoundedCache()
        self._stager = AreaReducer(self.rank, self._memories, self._addresses, STAGES_AT, STAGE)
        # Measured on 16 cores: up to 300 KiB among 3 ranks, 500 among 4, 2 MiB and more among 8.
        self._staged_limit = 0 if self.size == 2 else min(STAGE, 32 * 1024 * self.size**2)

    def _expose(
        self, tensors: Sequence[torch.Tensor], words: bytes = b"", reduced: bool = False
    ) -> int:
        """Show `words` and tensors to all ranks; return the slot's offset once all have done so.

        Tensors that are to be `reduced` may be copied into a staging area. The pointer is then the
        number of that area instead of an address.
        """
        self._exchanges += 1
        slot = CONTROL + (self._exchanges & 1) * _SLOT
        memory = self._memories[self.rank]
        pointer = nbytes = 0
        if len(tensors) == 1:
            pointer, nbytes = tensors[0].data_ptr(), tensors[0].nbytes
            if 0 < nbytes <= self._inline:
                ctypes.memmove(self._addresses[self.rank] + slot + PAYLOAD_AT, pointer, nbytes)
            elif reduced and self._is_staged(nbytes):
                pointer = self._stager.fill(tensors)
        elif tensors:
            self._tensor_bytes = sizes = [tensor.nbytes for tensor in tensors]
            self._tensor_addresses = addresses = [tensor.data_ptr() for tensor in tensors]
            nbytes = sum(sizes)
            if 0 < nbytes <= self._inline:
                target = self._addresses[self.rank] + slot + PAYLOAD_AT
                for address, size in zip(addresses, sizes, strict=True):
                    ctypes.memmove(target, address, size)
                    target += size
            elif reduced and self._is_staged(nbytes):
                pointer = self._stager.fill(tensors)
            else:
                struct.pack_into(f"{len(addresses)}Q", memory, slot + _POINTERS_AT, *addresses)
        header = struct.pack("3Q", pointer, nbytes, len(words))
        memory[slot : slot + _HEADER + len(words)] = header + words
        self._exposed_step = step = self._publish()
        self._await(step)
        return slot

    def _exposed(self, slot: int) -> Exposed:
        """Return the single tensor that every rank showed in its slot."""
        shown = [struct.unpack_from("2Q", memory, slot) for memory in self._memories]
        return Exposed([pointer for pointer, _ in shown], [nbytes for _, nbytes in shown])

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
            self._fail(error, self._at_risk(preload or ()), self._exposed_step)
            raise

    def _common_words(self, slot: int) -> int:
        """Return how many leading words are the same in all slots."""
        everyone = []
        for memory in self._memories:
            (length,) = struct.unpack_from("Q", memory, slot + 2 * WORD)
            start = slot + WORDS_AT
            everyone.append(bytes(memory[start : start + length]))
        return count_common_words(everyone)

    def _is_staged(self, nbytes: int) -> bool:
        """Return whether a reduction that is too large for the slot goes through staging areas."""
        return nbytes <= self._staged_limit or not self.peer_memory

    def _at_risk(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the tensors that peers write to: those that are not copied elsewhere first."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return () if nbytes <= self._inline or self._is_staged(nbytes) else tensors

    def _inline_blocks(self, slot: int, dtype: torch.dtype, count: int) -> list[Any]:
        """Return the payload of every rank's slot, as operands of arithmetic."""
        key = (slot, dtype, count)
        blocks = self._inline_views.get(key)
        if blocks is None:
            offset = slot + PAYLOAD_AT
            blocks = self._inline_views[key] = [
                as_blocks(torch.frombuffer(memory, dtype=dtype, count=count, offset=offset))
                for memory in self._memories
            ]
        return blocks

    def _pointers(self, slot: int, count: int) -> list[Sequence[int]]:
        """Return the addresses of the tensors that were exposed, of every rank."""
        first = (slot + _POINTERS_AT if count > 1 else slot) // WORD
        return [words[first : first + count].tolist() for words in self._words]
