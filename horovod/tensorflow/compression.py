"""The compressors for TensorFlow's tensors; see `horovod.common.compression`."""

from __future__ import annotations

import tensorflow as tf

from horovod.common.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type; the context is the original type."""

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, tf.float16), tensor.dtype


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16, which keeps float32's range."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, tf.bfloat16), tensor.dtype


class Compression:
    """The compressors to choose from: `none`, `fp16` and `bf16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
