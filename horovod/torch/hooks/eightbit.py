"""EightBit: gradients travel as bytes with a scale for each block of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.torch.hooks.base import GradientBucket
from horovod.torch.hooks.compressing import FeedbackHook, allreduce_traffic

Tensor = torch.Tensor

BLOCK = 256  # elements that share a scale
_LARGEST = 127
_WIRE_BLOCK = BLOCK + torch.float32.itemsize  # bytes


class EightBit(FeedbackHook):
    """Signed 8-bit numbers times a scale for each block of 256 elements of a parameter.

    The largest magnitude of a block is 127 times its scale, a float32, which travels with the
    block: 260 bytes. Each rank gets everybody's bytes for its part of the blocks (alltoall), adds
    them up as float32, and sends the bytes of the sum to all (allgather). So at most 2.03 bytes
    leave a rank for an element, however many ranks there are. Both roundings are by at most half
    a scale. With `error_feedback` what they take away is added to the next gradient.

    Parameters of fewer than 66 float32 elements travel as they are. Does not work while ranks have
    joined (`hvd.join`).
    """

    def _compressed_traffic(self, shape: torch.Size, dtype: torch.dtype, num_ranks: int) -> float:
        # All parts but its own leave a rank, and its own sum goes to all others.
        return allreduce_traffic(_num_blocks(shape.numel()) * _WIRE_BLOCK, num_ranks)

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
        blocks = torch.cat([_in_blocks(self._corrected(name, grad)) for name, grad in chosen])
        wire = _encode(blocks)
        each, extra = divmod(len(blocks), bucket.num_ranks)
        shares = [each + (rank < extra) for rank in range(bucket.num_ranks)]
        first = sum(shares[: bucket.rank])
        own = slice(first, first + shares[bucket.rank])
        wait = bucket.alltoall(wire, shares, ".parts")

        def finish() -> None:
            parts = _decode(wait()).view(bucket.num_ranks, shares[bucket.rank], BLOCK)
            sums = parts.sum(0)
            sums_wire = _encode(sums)
            (everything,) = bucket.allgather([sums_wire], ".sums")()
            rest = blocks - _decode(wire)
            rest[own] += sums - _decode(sums_wire)
            results = _decode(everything).mul_(bucket.scale)
            start = 0
            for name, gradient in chosen:
                end = start + _num_blocks(gradient.numel())
                gradient.copy_(results[start:end].view(-1)[: gradient.numel()])
                # A copy: a view would keep the memory of the whole bucket.
                residual = rest[start:end].view(-1)[: gradient.numel()].clone()
                self._keep(name, residual, gradient)
                start = end

        return finish


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def _in_blocks(flat: Tensor) -> Tensor:
    """As float32, one block a row, the last one filled up with zeros."""
    missing = -flat.numel() % BLOCK
    return torch.nn.functional.pad(flat.to(torch.float32), (0, missing)).view(-1, BLOCK)


def _encode(blocks: Tensor) -> Tensor:
    """Each block's bytes, then its scale's. A block with an inf or NaN has such a scale."""
    scales = blocks.abs().amax(1, keepdim=True).div_(_LARGEST)
    divisors = torch.where(scales > 0, scales, 1.0)
    numbers = (blocks / divisors).round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_(0.0)
    return torch.cat([numbers.to(torch.int8).view(torch.uint8), scales.view(torch.uint8)], 1)


def _decode(wire: Tensor) -> Tensor:
    scales = wire[:, BLOCK:].contiguous().view(torch.float32)
    return wire[:, :BLOCK].view(torch.int8).to(torch.float32) * scales
