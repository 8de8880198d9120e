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

_IN_CACHE = 1024  # rows that are worked on at a time: more would leave the second-level cache
# An e4m3 number is the leading bits of a float16, but for the bias of the exponent.
_ABOVE_MANTISSA = 7
_WITHOUT_BIT_14 = -16385
_BIAS = 256.0

_memory = threading.local()


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


def encode(blocks: Tensor, rows: Tensor, kind: torch.dtype) -> None:
    """Write blocks of float32 into rows of bytes. The scale of a block with inf or NaN is such."""
    step = _step(blocks)
    for start in range(0, len(blocks), step):
        some, target = blocks[start : start + step], rows[start : start + step]
        numbers = _scratch(some, torch.float32)
        scales = torch.abs(some, out=numbers).amax(1, keepdim=True).div_(LARGEST[kind])
        # Dividing is exact where multiplying by a reciprocal is not: 127 scales stay 127.
        torch.div(some, torch.where(scales > 0, scales, 1.0), out=numbers)
        if kind is torch.int8:
            numbers.round_().clamp_(-127, 127).nan_to_num_(0.0)
        target[:, :BLOCK].view(kind).copy_(numbers)
        target[:, BLOCK:] = scales.view(torch.uint8)


def decode(
    rows: Tensor, blocks: Tensor, kind: torch.dtype, add: bool = False, factor: float = 1.0
) -> None:
    """Write the numbers of rows, times `factor`, into blocks of float32, or `add` them to these."""
    step = _step(blocks)
    for start in range(0, len(rows), step):
        some, target = rows[start : start + step], blocks[start : start + step]
        scales = some[:, BLOCK:].contiguous().view(torch.float32)
        numbers: Tensor = some[:, :BLOCK].view(torch.int8)
        if kind is not torch.int8:  # torch converts float8 ten times slower than float16
            bits = _scratch(target, torch.int16).copy_(numbers)
            bits.bitwise_left_shift_(_ABOVE_MANTISSA).bitwise_and_(_WITHOUT_BIT_14)
            numbers = bits.view(torch.float16)
            scales = scales * _BIAS
        if factor != 1.0:
            scales = scales * factor
        if add:
            target.add_(_scratch(target, torch.float32).copy_(numbers).mul_(scales))
        else:
            target.copy_(numbers).mul_(scales)


def _scratch(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory of this thread in the shape of `like`: fresh memory would cost more than the work."""
    if not like.is_cpu:
        return torch.empty_like(like, dtype=dtype)
    memory: Tensor | None = getattr(_memory, str(dtype), None)
    if memory is None:
        memory = torch.empty(_IN_CACHE, BLOCK, dtype=dtype)
        setattr(_memory, str(dtype), memory)
    return memory[: len(like)]


def _step(blocks: Tensor) -> int:
    """Return how many blocks to work on at a time; on a device, all."""
    return _IN_CACHE if blocks.is_cpu else max(1, len(blocks))
