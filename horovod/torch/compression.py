"""The compressors of PyTorch tensors; see `horovod.common.compression`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovod.common.compression import Compressor, NoneCompressor

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "FP8Compressor",
    "Int8Compressor",
    "NoneCompressor",
]

_WIDE = (torch.float32, torch.float64)


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type; the context is the original type."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as float16."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16, which keeps float32's range."""

    dtype = torch.bfloat16


class EightBitCompressor(Compressor):
    """Sends floating-point tensors in 8 bits, with a scale for every 256 elements.

    Such numbers cannot be added up as they are, so a pair of functions around an allreduce does not
    do: the transport compresses, or a communication hook.
    """

    name: str
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise ValueError(
            f"hvd.Compression.{cls.name} works with DistributedOptimizer, and with allreduce of "
            f"float32 and float64 tensors in host memory that need no gradient: use "
            f"hvd.Compression.bf16 here"
        )


class Int8Compressor(EightBitCompressor):
    """Sends evenly spaced 8-bit numbers."""

    name = "int8"
    dtype = torch.int8


class FP8Compressor(EightBitCompressor):
    """Sends 8-bit floating-point numbers (e4m3)."""

    name = "fp8"
    dtype = torch.float8_e4m3fn


# The types of the compressors that do nothing but convert.
NARROW: dict[type[Compressor], torch.dtype] = {
    each: each.dtype for each in (FP16Compressor, BF16Compressor)
}

# The types in which the transport can send between hosts, by compressor.
_ON_THE_WIRE: dict[type[Compressor], torch.dtype] = {
    **NARROW,
    **{each: each.dtype for each in (Int8Compressor, FP8Compressor)},
}


def wire_type(
    compression: type[Compressor], params: Sequence[tuple[str, torch.nn.Parameter]]
) -> torch.dtype | None:
    """Return the type in which gradients travel between hosts, at full precision inside a host.

    None for other compressors, and unless all parameters are float32 or float64 in host memory.
    """
    wide = all(param.is_cpu and param.dtype in _WIDE for _, param in params)
    return _ON_THE_WIRE.get(compression) if wide else None


def wire_type_of(compression: type[Compressor], tensor: torch.Tensor) -> torch.dtype | None:
    """Return what `wire_type` does, for a single tensor."""
    return _ON_THE_WIRE.get(compression) if tensor.is_cpu and tensor.dtype in _WIDE else None


def eight_bit_type(
    compression: type[Compressor], tensors: Sequence[torch.Tensor]
) -> torch.dtype | None:
    """Return the 8-bit type in which an allreduce of `tensors` travels; None for other compressors.

    Raises:
        ValueError: These tensors cannot be sent in 8 bits.
    """
    if not is_eight_bit(compression):
        return None
    for tensor in tensors:
        if wire_type_of(compression, tensor) is None or tensor.requires_grad:
            compression.compress(tensor)  # raises, and says what works
    return _ON_THE_WIRE[compression]


def is_eight_bit(compression: object) -> bool:
    """Return whether this is a compressor that sends 8 bits."""
    return isinstance(compression, type) and issubclass(compression, EightBitCompressor)


class Compression:
    """The compressors to choose from: `none`, `fp16`, `bf16`, `fp8` and `int8`.

    In 8 bits every 256 elements share a scale. Sums are made in float32, and sent in 8 bits again.

    Examples:
        >>> hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.bf16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    fp8 = FP8Compressor
    int8 = Int8Compressor
