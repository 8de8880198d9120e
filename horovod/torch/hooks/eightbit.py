"""EightBit: gradients travel as bytes with a scale for each block of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovod.torch.hooks.base import GradientBucket
from horovod.torch.hooks.compressing import FeedbackHook, allreduce_traffic
from horovod.transport.eight_bits import BLOCK, FP8, ROW, Rows, in_blocks, num_rows

Tensor = torch.Tensor

_KINDS = {"int8": torch.int8, "fp8": FP8}


class EightBit(FeedbackHook):
    """Sends gradients as 8-bit numbers times a scale for each 256 elements of a parameter.

    The largest magnitude of a block is 127 times its scale (448 times, with fp8), a float32, which
    travels with the block: 260 bytes. Each rank gets everybody's bytes for its part of the blocks
    (alltoall), adds them up as float32, and sends the bytes of the sum to all (allgather). So at
    most 2.03 bytes leave a rank for an element, however many ranks there are. Both roundings are by
    at most half a scale, with fp8 by at most a sixteenth of the number.

    Parameters of fewer than 66 float32 elements travel as they are. Does not work while ranks have
    joined (`hvd.join`).

    Args:
        error_feedback: Whether what the roundings take away is added to the next gradient; True
            by default.
        numbers: ``"int8"`` for evenly spaced numbers, the default, or ``"fp8"`` for floating-point
            ones (e4m3), which keep more of small elements beside large ones.

    Raises:
        ValueError: `numbers` is neither.
    """

    def __init__(self, error_feedback: bool = True, numbers: str = "int8") -> None:
        super().__init__(error_feedback)
        if numbers not in _KINDS:
            raise ValueError(f"numbers must be 'int8' or 'fp8', not {numbers!r}")
        self.numbers = numbers

    def _compressed_traffic(self, shape: torch.Size, dtype: torch.dtype, num_ranks: int) -> float:
        # All parts but its own leave a rank, and its own sum goes to all others.
        return allreduce_traffic(num_rows(shape.numel()) * ROW, num_ranks)

    def start(self, bucket: GradientBucket) -> Callable[[], None]:
        chosen, plain = self._divided(bucket)
        finishers: list[Callable[[], object]] = []
        if plain:
            finishers.append(bucket.allreduce(plain))
        if chosen:
            finishers.append(self._start(bucket, chosen))

        def finish() -> None:
            for finisher in finishers:
                finisher()

        return finish

    def _start(
        self, bucket: GradientBucket, chosen: list[tuple[str, Tensor]]
    ) -> Callable[[], None]:
        kind = _KINDS[self.numbers]
        blocks = torch.cat([in_blocks(self._corrected(name, grad)) for name, grad in chosen])
        wire = _encoded(blocks, kind)
        each, extra = divmod(len(blocks), bucket.num_ranks)
        shares = [each + (rank < extra) for rank in range(bucket.num_ranks)]
        first = sum(shares[: bucket.rank])
        own = slice(first, first + shares[bucket.rank])
        wait = bucket.alltoall(wire, shares, ".parts")

        def finish() -> None:
            parts = _decoded(wait(), kind).view(bucket.num_ranks, shares[bucket.rank], BLOCK)
            sums = parts.sum(0)
            sums_wire = _encoded(sums, kind)
            (everything,) = bucket.allgather([sums_wire], ".sums")()
            rest = blocks - _decoded(wire, kind)
            rest[own] += sums - _decoded(sums_wire, kind)
            results = _decoded(everything, kind).mul_(bucket.scale)
            start = 0
            for name, gradient in chosen:
                end = start + num_rows(gradient.numel())
                gradient.copy_(results[start:end].view(-1)[: gradient.numel()])
                # A copy: a view would keep the memory of the whole bucket.
                residual = rest[start:end].view(-1)[: gradient.numel()].clone()
                self._keep(name, residual, gradient)
                start = end

        return finish


def _encoded(blocks: Tensor, kind: torch.dtype) -> Tensor:
    rows = torch.empty(len(blocks), ROW, dtype=torch.uint8, device=blocks.device)
    Rows(rows, kind).encode(blocks)
    return rows


def _decoded(rows: Tensor, kind: torch.dtype) -> Tensor:
    blocks = torch.empty(len(rows), BLOCK, device=rows.device)
    Rows(rows, kind).decode(blocks)
    return blocks


def eight_bit_hook(compression: Any) -> EightBit:
    """Return the hook that does for tensors on devices what an 8-bit compressor asks for."""
    return EightBit(error_feedback=False, numbers=compression.name)
