"""What the benchmarks of single collectives reduce. Used in their ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

POOL_BYTES = 256 << 20  # rotate through this much memory, more than any cache holds,
POOL_BUFFERS = (3, 32)  # but through no fewer and no more buffers than this


def rotating(nbytes: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Buffers of that size to take turns with: a large tensor never waits in a cache."""
    fewest, most = POOL_BUFFERS
    return [
        torch.zeros(nbytes // 4, device=device).fill_(
            0
        )  # touched, so that no page is missing later
        for _ in range(max(fewest, min(most, POOL_BYTES // nbytes)))
    ]


def verify(
    key: str, allreduce: Callable[[torch.Tensor], None], buffer: torch.Tensor, rank: int, size: int
) -> None:
    """RuntimeError if that contender's sum is wrong."""
    buffer.fill_(rank + 1)
    allreduce(buffer)
    if not bool((buffer == size * (size + 1) / 2).all()):
        raise RuntimeError(f"{key} gave a wrong sum for {buffer.nbytes} bytes")
    buffer.fill_(0)
