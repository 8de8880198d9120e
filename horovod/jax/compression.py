"""The compressors for JAX arrays; see `horovod.common.compression`.

Inside `jax.jit` they are compiled with the rest of the step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from horovod.common.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(Compressor):
    """Sends floating-point arrays in a narrower type; the context is the original type."""

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tensor.astype(ctx)


def _narrow(tensor: Any, dtype: Any) -> tuple[Any, Any]:
    """Return a floating-point array in the type `dtype`, and its original type."""
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        return tensor, None
    return tensor.astype(dtype), tensor.dtype


class FP16Compressor(_CastCompressor):
    """Sends floating-point arrays as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _narrow(tensor, jnp.float16)


class BF16Compressor(_CastCompressor):
    """Sends floating-point arrays as bfloat16, which keeps float32's range."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _narrow(tensor, jnp.bfloat16)


class Compression:
    """The compressors to choose from.

    `Compression.none` sends arrays as they are. `Compression.fp16` and `Compression.bf16` send
    floating-point arrays as float16 and bfloat16; the latter keeps the range of float32.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
