"""The compressors for MXNet's arrays; see `horovod.common.compression`."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.common.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


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
    """The compressors to choose from.

    `Compression.none` sends arrays as they are, `Compression.fp16` sends floating-point arrays as
    float16.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
