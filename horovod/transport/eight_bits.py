"""Real numbers in 8 bits: blocks of 256 numbers that share a scale, which follows them.

The largest magnitude of a block is the largest number of the 8-bit type times the scale, a float32;
a *row* of 260 bytes has both. As ``torch.int8`` the numbers of a block are evenly spaced; as
``torch.float8_e4m3fn`` (four bits of exponent, three of mantissa) small ones keep more of their
precision, and large ones less. Used by `coded_reduction` between hosts and by the hook
`horovod.torch.hooks.eightbit`.
"""

from __future__ import annotations

import threading
from typing import TypeGuard

import torch

Tensor = torch.Tensor

BLOCK = 256  # numbers that share a scale
ROW = BLOCK + torch.float32.itemsize  # bytes
FP8 = torch.float8_e4m3fn
LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, FP8: 448.0}

_IN_CACHE = 512  # rows that are worked on at a time: more would leave the second-level cache
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # smaller ones have too few bits
# An e4m3 number is the leading bits of a float16, except for the bias of the exponent. Constants
# are tensors, because torch would make a tensor of a number each time.
_TO_FLOAT16 = torch.tensor(1 << 7, dtype=torch.int16)
_WITHOUT_BIT_14 = torch.tensor(-16385, dtype=torch.int16)
_BIAS = 256.0


def is_coded(wire: torch.dtype | None) -> TypeGuard[torch.dtype]:
    """Return whether tensors that travel as this type travel in rows."""
    return wire in LARGEST


def num_rows(count: int) -> int:
    """Return how many rows `count` numbers take."""
    return -(-count // BLOCK)


def in_blocks(flat: Tensor) -> Tensor:
    """Return numbers as float32, one block a row, the last block filled up with zeros."""
    missing = -flat.numel() % BLOCK
    wide = flat.to(torch.float32)
    if missing:
        wide = torch.nn.functional.pad(wide, (0, missing))
    return wide.view(-1, BLOCK)


class _Scratch(threading.local):
    """Memory of one thread for the rows that it works on: fresh memory would cost more time."""

    def __init__(self) -> None:
        self.numbers = torch.empty(_IN_CACHE, BLOCK)
        self.halves = torch.empty(_IN_CACHE, BLOCK, dtype=torch.float16)
        self.bits = self.halves.view(torch.int16)


_scratch = _Scratch()


class Rows:
    """Rows of 8-bit numbers, and the views of them that coding needs.

    Making the views takes nearly as long as coding, so keep this object with the memory.

    Args:
        memory: The rows, as bytes.
        kind: The 8-bit type.
    """

    def __init__(self, memory: Tensor, kind: torch.dtype) -> None:
        self._kind = kind
        self._largest = torch.tensor(LARGEST[kind])
        # On a device all rows are worked on at once.
        self._step = _IN_CACHE if memory.is_cpu else max(1, len(memory))
        codes, words = memory[:, :BLOCK], memory.view(torch.float32)
        self._codes = torch.split(codes.view(kind), self._step)
        self._bits = torch.split(codes.view(torch.int8), self._step)
        self._scales = torch.split(words[:, BLOCK // torch.float32.itemsize :], self._step)

    def encode(self, blocks: Tensor) -> None:
        """Write blocks of float32 into the rows. A block with inf or NaN has a scale like that."""
        parts = torch.split(blocks, self._step)
        for part, codes, scales in zip(parts, self._codes, self._scales, strict=True):
            numbers = _like(part, _scratch.numbers)
            torch.amax(torch.abs(part, out=numbers), 1, True, out=scales)
            scales.div_(self._largest).clamp_min_(_SMALLEST_SCALE)
            # Dividing is exact where multiplying by a reciprocal is not: 127 scales stay 127.
            torch.div(part, scales, out=numbers)
            codes.copy_(numbers.round_() if self._kind is torch.int8 else numbers)

    def decode(self, blocks: Tensor, add: bool = False, factor: float = 1.0) -> None:
        """Write the numbers, times `factor`, into blocks of float32; with `add`, add them there."""
        is_float = self._kind is not torch.int8
        scaling = torch.tensor(factor * _BIAS if is_float else factor)
        parts = torch.split(blocks, self._step)
        for part, codes, scales in zip(parts, self._bits, self._scales, strict=True):
            numbers = _like(part, _scratch.numbers)
            if is_float:  # torch converts float8 ten times slower than float16
                bits = _like(part, _scratch.bits)
                bits.copy_(codes).mul_(_TO_FLOAT16).bitwise_and_(_WITHOUT_BIT_14)
                numbers.copy_(_scratch.halves if bits is _scratch.bits else bits.view(torch.half))
            else:
                numbers.copy_(codes)
            scales = torch.mul(scales, scaling)
            if add:
                part.addcmul_(numbers, scales)
            else:
                torch.mul(numbers, scales, out=part)


def _like(part: Tensor, scratch: Tensor) -> Tensor:
    """Return scratch memory in the shape of a part and on its device."""
    if part.is_cpu:
        return scratch if len(part) == _IN_CACHE else scratch[: len(part)]
    return torch.empty_like(part, dtype=scratch.dtype)
