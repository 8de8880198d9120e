"""Adasum: a reduction that adds what is orthogonal and averages what is parallel.

The engine calls `adasum_` for ``op=hvd.Adasum``. Two gradients combine as

    a' = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

and more of them over a binary tree of ranks. Dot products and norms belong to each original
tensor, so that fusing tensors into one call does not change the result.

How the work is spread: the tensors, laid end to end, are cut into one slice per rank, and an
all-to-all gives rank r slice r of every rank's vector. The whole tree is then evaluated locally
on each slice, except that the dot products of a level, a few numbers per tensor, are summed over
the slices. An all-gather puts the result together. Every rank sends and receives 2(n-1)/n of its
vector, for any number of ranks, and as each element is computed on one rank only, the result is
bitwise the same everywhere.

Ranks of one host can count as one, with the average of their gradients. On GPUs they do: scripts
multiply the learning rate by the number of ranks on a host there, as Horovod's documentation says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import Transport

# The arithmetic of each dtype. Half precisions travel as they are, but are combined in fp32 and
# rounded once, at the end. fp32 stays fp32: the sums that could cancel (dots and norms) are fp64
# for every dtype, and what is left is one multiply-add per level of the tree.
WORK_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
SMALLEST_NORM = sys.float_info.min**0.5  # no smaller squared norm is divided by
BLOCK = 1 << 16  # elements converted to fp64 at a time: half a megabyte, which stays in cache

Segment = tuple[int, int, int]  # tensor index, and begin and end of its part of our slice


def adasum_(
    tensors: Sequence[torch.Tensor],
    transport: Transport,
    hosts: Sequence[Sequence[int]] | None = None,
) -> None:
    """Replace `tensors` by their Adasum over all ranks of `transport`, in place.

    They are flat, contiguous tensors of one floating dtype and device, with the same shapes on all
    ranks. The order of ranks in the tree is fixed; where their number is not a power of two, the
    odd one of a level passes to the next unchanged. With `hosts`, the lists of ranks on each, a
    host counts as one rank that has the average of its ranks' tensors.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= WORK_DTYPES.keys():
        named = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(
            f"Adasum works on tensors of one dtype out of float16, bfloat16, float32 and "
            f"float64, and got {named}: convert them first, or use op=hvd.Sum."
        )
    lengths = [tensor.numel() for tensor in tensors]
    total = sum(lengths)
    if transport.size == 1 or total == 0:
        return
    counts = [
        total // transport.size + (rank < total % transport.size) for rank in range(transport.size)
    ]
    own = counts[transport.rank]
    joined = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
    received = joined.new_empty(own * transport.size)
    transport.alltoall(joined, received, counts, [own] * transport.size)

    rows = received.to(WORK_DTYPES[joined.dtype]).view(transport.size, own)
    if hosts is not None:
        rows = torch.stack([rows[list(ranks)].mean(dim=0) for ranks in hosts])
    segments = segments_of_slice(lengths, begin=sum(counts[: transport.rank]), length=own)
    combine_tree(rows, segments, len(tensors), transport)

    transport.allgather(rows[0].to(joined.dtype), joined, counts)
    if len(tensors) > 1:
        for tensor, result in zip(tensors, torch.split(joined, lengths), strict=True):
            tensor.copy_(result)


def segments_of_slice(lengths: Sequence[int], begin: int, length: int) -> list[Segment]:
    """Return which tensors, of these lengths end to end, are where in [begin, begin + length)."""
    segments = []
    position = -begin
    for index, size in enumerate(lengths):
        first, last = max(position, 0), min(position + size, length)
        if first < last:
            segments.append((index, first, last))
        position += size
    return segments


def combine_tree(
    rows: torch.Tensor, segments: Sequence[Segment], num_tensors: int, transport: Transport
) -> None:
    """Combine all ranks' parts of our slice, a row for each, into row 0."""
    distance = 1
    while distance < len(rows):
        pairs = [
            (rows[low], rows[low + distance])
            for low in range(0, len(rows) - distance, 2 * distance)
        ]
        # Per pair and tensor: a.b, |a|^2, |b|^2. All ranks take part in the sum, also those
        # whose slice is empty.
        products = rows.new_zeros((len(pairs), num_tensors, 3), dtype=torch.float64)
        for pair, (a, b) in zip(products, pairs, strict=True):
            for index, first, last in segments:
                add_products(pair[index], a[first:last], b[first:last])
        transport.allreduce(products.view(-1), ReduceOp.SUM)
        for pair, (a, b) in zip(products.tolist(), pairs, strict=True):
            for index, first, last in segments:
                dot, a_norm, b_norm = pair[index]
                a[first:last].mul_(coefficient(dot, a_norm))
                a[first:last].add_(b[first:last], alpha=coefficient(dot, b_norm))
        distance *= 2


def add_products(sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a.b, |a|^2 and |b|^2 to `sums`, in fp64."""
    for a_block, b_block in zip(torch.split(a, BLOCK), torch.split(b, BLOCK), strict=True):
        wide_a, wide_b = a_block.double(), b_block.double()
        sums[0] += wide_a.dot(wide_b)
        sums[1] += wide_a.dot(wide_a)
        sums[2] += wide_b.dot(wide_b)


def coefficient(dot: float, norm: float) -> float:
    """Return how much of a vector of squared norm `norm` enters its combination with another."""
    return 1.0 if norm < SMALLEST_NORM else 1.0 - dot / (2.0 * norm)
