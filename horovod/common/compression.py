"""Gradient compression, for the tensors of any framework: what travels in place of a tensor.

A compressor is a class with two static methods. Users write their own like these, and pass them as
``compression=`` to the reductions and to the optimizers of a binding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Compressor:
    """Turns a tensor into a smaller one and back."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and the context that `decompress` gets."""
        raise NotImplementedError("a compressor defines compress(tensor) -> (tensor, context)")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return a received tensor in the form that it had before `compress`."""
        raise NotImplementedError("a compressor defines decompress(tensor, context) -> tensor")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type; the context is the original type.

    Bindings derive from it: `cast` and `is_floating` are those of their framework.
    """

    dtype: Any

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor in another type."""
        return tensor.astype(dtype)

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        """Return whether the tensor has a floating-point type."""
        raise NotImplementedError("each binding defines it for its tensors")

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if not cls.is_floating(tensor):
            return tensor, None
        return cls.cast(tensor, cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else cls.cast(tensor, ctx)


def run_compressed(
    run: Callable[[list[Any]], Sequence[Any]], tensors: Sequence[Any], compression: Any
) -> list[Any]:
    """Compress tensors, call `run` with what is to be sent, and return its results decompressed."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = run([tensor for tensor, _ in pairs])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]
