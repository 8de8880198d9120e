"""The compressors for TensorFlow's tensors; see `horovod.common.compression`."""

from __future__ import annotations

import tensorflow as tf

from horovod.common.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(CastCompressor):
    """Converts TensorFlow's tensors."""

    cast = staticmethod(tf.cast)

    @staticmethod
    def is_floating(tensor: tf.Tensor) -> bool:
        return bool(tensor.dtype.is_floating)


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as float16."""

    dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16, which keeps float32's range."""

    dtype = tf.bfloat16


class Compression:
    """The compressors to choose from: `none`, `fp16` and `bf16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
