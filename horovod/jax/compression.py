"""The compressors for JAX arrays; see `horovod.common.compression`.

Inside `jax.jit` they are compiled with the rest of the step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from horovod.common.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(CastCompressor):
    """Converts arrays of JAX."""

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return bool(jnp.issubdtype(tensor.dtype, jnp.floating))


class FP16Compressor(_CastCompressor):
    """Sends floating-point arrays as float16."""

    dtype = jnp.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point arrays as bfloat16, which keeps float32's range."""

    dtype = jnp.bfloat16


class Compression:
    """The compressors to choose from.

    `Compression.none` sends arrays as they are. `Compression.fp16` and `Compression.bf16` send
    floating-point arrays as float16 and bfloat16; the latter keeps the range of float32.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
