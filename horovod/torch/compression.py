"""The compressors of PyTorch tensors; see `horovod.common.compression`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovod.common.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

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


# The types of those that convert and do nothing else.
NARROW: dict[type[Compressor], torch.dtype] = {
    each: each.dtype for each in (FP16Compressor, BF16Compressor)
}


def wire_type(
    compression: type[Compressor], params: Sequence[tuple[str, torch.nn.Parameter]]
) -> torch.dtype | None:
    """The type in which gradients may travel between hosts, with full precision inside a host.

    None where that is not what the compressor means, or not all gradients are in host memory.
    """
    wide = all(param.is_cpu and param.dtype in _WIDE for _, param in params)
    return NARROW.get(compression) if wide else None


def wire_type_of(compression: type[Compressor], tensor: torch.Tensor) -> torch.dtype | None:
    """The same for a single tensor."""
    return NARROW.get(compression) if tensor.is_cpu and tensor.dtype in _WIDE else None


class Compression:
    """The compressors to choose from: `none`, `fp16` and `bf16`.

    Examples:
        >>> hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.bf16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
