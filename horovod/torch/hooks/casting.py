"""Hooks that send gradients in half precision."""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.torch.hooks.base import GradientBucket
from horovod.torch.hooks.compressing import CompressingHook, allreduce_traffic


class _Casting(CompressingHook):
    """Sends two bytes per element by allreduce, of gradients that have more."""

    _dtype: torch.dtype

    def _compressed_traffic(self, shape: torch.Size, dtype: torch.dtype, num_ranks: int) -> float:
        return allreduce_traffic(shape.numel() * self._dtype.itemsize, num_ranks)

    def start(self, bucket: GradientBucket) -> Callable[[], None]:
        narrow = [
            gradient.to(self._dtype) if worthwhile else gradient
            for gradient, worthwhile in zip(bucket.gradients, self._worthwhile(bucket), strict=True)
        ]
        wait = bucket.allreduce(narrow)

        def finish() -> None:
            wait()
            for gradient, result in zip(bucket.gradients, narrow, strict=True):
                if result is not gradient:
                    gradient.copy_(result)

        return finish


class FP16(_Casting):
    """Sends gradients as float16.

    Each is rounded twice, to 11 bits, before and after the reduction. Beyond 65504 it becomes
    infinite, and below 6e-8 it is lost: use it with loss scaling, or use `BF16`.
    """

    _dtype = torch.float16


class BF16(_Casting):
    """Sends gradients as bfloat16.

    Each is rounded twice, to 8 bits, before and after the reduction; the range is float32's.
    """

    _dtype = torch.bfloat16
