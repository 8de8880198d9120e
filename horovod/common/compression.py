"""Gradient compression: what travels in place of a tensor, whichever framework it is of.

A compressor is a class with two static methods; users write their own by the same shape and pass
them as ``compression=`` to the reductions and to the optimizers of a binding.
"""

from __future__ import annotations

from typing import Any


class Compressor:
    """Turns a tensor into a smaller one and back."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what `decompress` needs to know."""
        raise NotImplementedError("a compressor defines compress(tensor) -> (tensor, context)")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The received tensor in its original form."""
        raise NotImplementedError("a compressor defines decompress(tensor, context) -> tensor")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor
