"""Gradient compression: what travels in place of an array.

A compressor is a class with two static methods; users write their own by the same shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np


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


class FP16Compressor(Compressor):
    """Sends floating-point arrays as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        if not np.issubdtype(tensor.dtype, np.floating):
            return tensor, None
        return tensor.astype("float16"), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tensor.astype(ctx)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
