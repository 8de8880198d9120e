"""The compressors for MXNet's arrays; see `horovod.common.compression`."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.common.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(CastCompressor):
    """Sends floating-point arrays as float16."""

    dtype = "float16"

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return bool(np.issubdtype(tensor.dtype, np.floating))


class Compression:
    """The compressors to choose from.

    `Compression.none` sends arrays as they are, `Compression.fp16` sends floating-point arrays as
    float16.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
