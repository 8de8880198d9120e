"""Gradient compression: what travels in place of an array.

A compressor is a class with two static methods; users write their own by the same shape and pass
them as ``compression=`` to the reductions and to `DistributedOptimizer`. Inside of jit they are
compiled with the rest of the step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


class Compressor:
    """Turns an array into a smaller one and back."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The array to send, and what `decompress` needs to know."""
        raise NotImplementedError("a compressor defines compress(array) -> (array, context)")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The received array in its original form."""
        raise NotImplementedError("a compressor defines decompress(array, context) -> array")


class NoneCompressor(Compressor):
    """Sends arrays as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point arrays in a narrower type; the context is the original type."""

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tensor.astype(ctx)


def _narrowed(tensor: Any, dtype: Any) -> tuple[Any, Any]:
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        return tensor, None
    return tensor.astype(dtype), tensor.dtype


class FP16Compressor(_CastCompressor):
    """Sends floating-point arrays as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _narrowed(tensor, jnp.float16)


class BF16Compressor(_CastCompressor):
    """Sends floating-point arrays as bfloat16, which keeps float32's range."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _narrowed(tensor, jnp.bfloat16)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
