"""Dividing flat tensors into slices. Used by the transports."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


def split_evenly(count: int, parts: int) -> list[int]:
    """Return `parts` nearly equal numbers, larger ones first, whose sum is `count`."""
    share, rest = divmod(count, parts)
    return [share + (index < rest) for index in range(parts)]


def offsets_of(counts: Sequence[int]) -> list[int]:
    """Return where each of the consecutive slices with these counts begins."""
    return [0, *accumulate(counts)][:-1]


def cut(tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return the consecutive slices of `tensor` that have these numbers of elements."""
    starts = offsets_of(counts)
    return [tensor[s : s + count] for s, count in zip(starts, counts, strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a flat, contiguous tensor.

    A tensor of one element or none counts as contiguous with any stride, but `view` refuses it.
    """
    if tensor.stride(0) != 1:
        tensor = tensor.as_strided(tensor.shape, (1,))
    return tensor.view(torch.uint8)


def overlaps(left: Sequence[int], right: Sequence[int]) -> list[list[int]]:
    """Return [i][j]: how many elements slice i of one division shares with slice j of another.

    Both divide the same data, into slices with the counts `left` and `right`.
    """
    return [
        [
            max(0, min(start + count, begin + length) - max(start, begin))
            for begin, length in zip(offsets_of(right), right, strict=True)
        ]
        for start, count in zip(offsets_of(left), left, strict=True)
    ]
