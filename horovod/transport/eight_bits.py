"""Real numbers in 8 bits: blocks of 256 that share a scale, which travels behind them.

The largest magnitude of a block is the largest number of the 8-bit type times the scale, a float32;
a *row* of 260 bytes holds both. As ``torch.int8`` the numbers of a block are evenly spaced; as
``torch.float8_e4m3fn`` (four bits of exponent, three of mantissa) small ones keep more of their
precision, and large ones less. Used by `coded_reduction` between hosts and by the hook
`horovod.torch.hooks.eightbit`.
"""

from __future__ import annotations

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


def is_coded(wire: torch.dtype | None) -> TypeGuard[torch.dtype]:
    """Whether what travels as this type travels in rows."""
    return wire in LARGEST


def num_rows(count: int) -> int:
    """The rows that so many numbers take."""
    return -(-count // BLOCK)


def in_blocks(flat: Tensor) -> Tensor:
    """Numbers as float32, one block a row, the last one filled up with zeros."""
    missing = -flat.numel() % BLOCK
    wide = flat.to(torch.float32)
    if missing:
        wide = torch.nn.functional.pad(wide, (0, missing))
    return wide.view(-1, BLOCK)


def encode(blocks: Tensor, rows: Tensor, kind: torch.dtype) -> None:
    """Write blocks of float32 into rows of bytes. One with an inf or NaN gets such a scale."""
    step = _step(blocks)
    for start in range(0, len(blocks), step):
        some, target = blocks[start : start + step], rows[start : start + step]
        scales = some.abs().amax(1, keepdim=True).div_(LARGEST[kind])
        # Dividing is exact where multiplying by a reciprocal is not: 127 scales stay 127.
        numbers = some / torch.where(scales > 0, scales, 1.0)
        if kind is torch.int8:
            numbers = numbers.round_().clamp_(-127, 127).nan_to_num_(0.0)
        target[:, :BLOCK] = numbers.to(kind).view(torch.uint8)
        target[:, BLOCK:] = scales.view(torch.uint8)


def decode(rows: Tensor, blocks: Tensor, kind: torch.dtype, add: bool = False) -> None:
    """Write the numbers of rows into blocks of float32, or add them to what is there."""
    step = _step(blocks)
    for start in range(0, len(rows), step):
        some, target = rows[start : start + step], blocks[start : start + step]
        scales = some[:, BLOCK:].contiguous().view(torch.float32)
        numbers = some[:, :BLOCK].view(torch.int8)
        if kind is torch.int8:
            wide = numbers.to(torch.float32)
        else:  # torch converts float8 ten times slower than float16
            bits = numbers.to(torch.int16).bitwise_left_shift_(_ABOVE_MANTISSA)
            wide = bits.bitwise_and_(_WITHOUT_BIT_14).view(torch.float16).to(torch.float32)
            scales = scales * _BIAS
        if add:
            target.add_(wide.mul_(scales))
        else:
            torch.mul(wide, scales, out=target)


def _step(blocks: Tensor) -> int:
    """How many blocks to work on at a time; on a device, all."""
    return _IN_CACHE if blocks.is_cpu else max(1, len(blocks))
