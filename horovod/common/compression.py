"""Gradient compression, for the tensors of any framework: what travels in place of a tensor.

A compressor is a class with two static methods. Users write their own like these, and pass them as
``compression=`` to the reductions and to the optimizers of a binding.
"""

from __future__ import annotations

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
