"""TopK: only the largest elements of a gradient travel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from horovod.torch.hooks.base import GradientBucket
from horovod.torch.hooks.compressing import FeedbackHook, allgather_traffic

Tensor = torch.Tensor

_INDEX = torch.int32


@dataclass
class _Selection:
    """The elements of a gradient that this rank sends, and what it does not."""

    name: str
    gradient: Tensor
    indices: Tensor
    values: Tensor
    rest: Tensor


class TopK(FeedbackHook):
    """Sends the largest elements (by magnitude) of every gradient, at least one.

    Positions and values travel by allgather, and every rank adds them up. Traffic grows with the
    number of ranks, so parameters where a plain allreduce would send less are reduced plainly: with
    float32 where ratio times ranks is 1 or more.

    Does not work while ranks have joined (`hvd.join`).

    Args:
        ratio: The part of a gradient's elements that is sent, 0.01 by default.
        error_feedback: Whether what was not sent is added to the next gradient, as by default.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, not {ratio}")
        self.ratio = ratio
        super().__init__(error_feedback)

    def _num_sent(self, num_elements: int) -> int:
        return min(num_elements, max(1, math.ceil(self.ratio * num_elements)))

    def _compressed_traffic(self, shape: torch.Size, dtype: torch.dtype, num_ranks: int) -> float:
        if shape.numel() > torch.iinfo(_INDEX).max:
            return math.inf
        each = _INDEX.itemsize + dtype.itemsize
        return allgather_traffic(self._num_sent(shape.numel()) * each, num_ranks)

    def start(self, bucket: GradientBucket) -> Callable[[], None]:
        chosen, plain = self._divided(bucket)
        selections = [self._select(name, gradient) for name, gradient in chosen]
        waits: list[Callable[[], list[Tensor]]] = []
        if plain:
            waits.append(bucket.allreduce(plain))
        # One row per rank: all indices, and all values of each type.
        by_type: dict[torch.dtype, list[_Selection]] = {}
        for selection in selections:
            by_type.setdefault(selection.values.dtype, []).append(selection)
        if selections:
            ordered = [selection for alike in by_type.values() for selection in alike]
            rows = [torch.cat([selection.indices for selection in ordered])]
            rows += [torch.cat([s.values for s in alike]) for alike in by_type.values()]
            waits.append(bucket.allgather([row.unsqueeze(0) for row in rows], ".largest"))

        def finish() -> None:
            results = [wait() for wait in waits]
            if not selections:
                return
            all_indices, *all_values = results[-1]
            indices_of = torch.split_with_sizes(
                all_indices, [s.indices.numel() for s in ordered], 1
            )
            values_of = [
                part
                for values, alike in zip(all_values, by_type.values(), strict=True)
                for part in torch.split_with_sizes(values, [s.values.numel() for s in alike], 1)
            ]
            for selection, indices, values in zip(ordered, indices_of, values_of, strict=True):
                self._add_up(selection, indices, values, bucket.scale)

        return finish

    def _select(self, name: str, gradient: Tensor) -> _Selection:
        corrected = self._corrected(name, gradient)
        indices = corrected.abs().topk(self._num_sent(corrected.numel()), sorted=False).indices
        chosen = corrected[indices]
        values = chosen.to(gradient.dtype)
        rest = corrected.index_copy_(0, indices, chosen - values)  # what rounding took away
        return _Selection(name, gradient, indices.to(_INDEX), values, rest)

    def _add_up(self, selection: _Selection, indices: Tensor, values: Tensor, scale: float) -> None:
        result = torch.zeros_like(selection.rest)
        for rank_indices, rank_values in zip(indices, values, strict=True):
            # Rank by rank, because no rank has an element twice: the order of additions is fixed.
            result.index_add_(0, rank_indices, rank_values.to(result.dtype))
        selection.gradient.copy_(result.mul_(scale))
        self._keep(selection.name, selection.rest, selection.gradient)
