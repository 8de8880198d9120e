"""What the compressing hooks share: what is worth compressing, and error feedback."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from horovod.torch.hooks.base import CommunicationHook, GradientBucket

Tensor = torch.Tensor


def allreduce_traffic(nbytes: int, num_ranks: int) -> float:
    """Return how many bytes each rank sends: what others reduce, and the part that it reduced."""
    return 2 * nbytes * (num_ranks - 1) / num_ranks


def allgather_traffic(nbytes: float, num_ranks: int) -> float:
    """Return how many bytes each rank sends on if everybody contributes `nbytes`."""
    return nbytes * (num_ranks - 1)


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return the type to calculate in: half precision is too coarse for small remainders."""
    return torch.promote_types(dtype, torch.float32)


class CompressingHook(CommunicationHook):
    """Compresses floating-point gradients where less travels then; others go as they are."""

    def traffic(self, shape: Sequence[int], dtype: torch.dtype, num_ranks: int) -> float:
        """Return how many bytes a rank sends, on average, to reduce one parameter's gradient."""
        plain = allreduce_traffic(math.prod(shape) * dtype.itemsize, num_ranks)
        if not dtype.is_floating_point:
            return plain
        return min(plain, self._compressed_traffic(torch.Size(shape), dtype, num_ranks))

    @abstractmethod
    def _compressed_traffic(self, shape: torch.Size, dtype: torch.dtype, num_ranks: int) -> float:
        """Return `traffic` for a parameter that is compressed, worthwhile or not."""

    def _divided(self, bucket: GradientBucket) -> tuple[list[tuple[str, Tensor]], list[Tensor]]:
        """Return the bucket's gradients to compress, with their names, and the others."""
        worthwhile = self._worthwhile(bucket)
        named = zip(bucket.names, bucket.gradients, strict=True)
        plain = [g for g, yes in zip(bucket.gradients, worthwhile, strict=True) if not yes]
        return list(itertools.compress(named, worthwhile)), plain

    def _worthwhile(self, bucket: GradientBucket) -> list[bool]:
        """Return which of the bucket's gradients to compress."""
        return [
            self.traffic(shape, gradient.dtype, bucket.num_ranks)
            < allreduce_traffic(gradient.nbytes, bucket.num_ranks)
            for shape, gradient in zip(bucket.shapes, bucket.gradients, strict=True)
        ]

    def __repr__(self) -> str:
        settings = (f"{key}={value!r}" for key, value in vars(self).items() if key[0] != "_")
        return f"{type(self).__name__}({', '.join(settings)})"


class FeedbackHook(CompressingHook):
    """Adds what compression left out of a gradient to the parameter's next one."""

    def __init__(self, error_feedback: bool = True) -> None:
        self.error_feedback = error_feedback
        self._residuals: dict[str, Tensor] = {}  # by parameter; replaced, never changed

    def _corrected(self, name: str, gradient: Tensor) -> Tensor:
        """Return a copy of the gradient plus what compression left out of earlier ones."""
        corrected = gradient.to(precise(gradient.dtype), copy=True)
        residual = self._residuals.get(name)
        if residual is not None:
            if residual.numel() != gradient.numel():
                raise ValueError(
                    f"{self!r} has a residual of {residual.numel()} elements for parameter "
                    f"{name!r}, which has {gradient.numel()}: was another model's state loaded?"
                )
            corrected.add_(residual.to(gradient.device))
        return corrected

    def _keep(self, name: str, residual: Tensor, result: Tensor) -> None:
        """Remember what compression left out of a parameter's gradient.

        If the result has an inf or NaN, which all ranks see alike, keep what was left out before:
        such a step is not taken (by torch.amp.GradScaler, say), and later ones must not suffer.
        """
        if self.error_feedback:
            before = self._residuals.get(name)
            usual = torch.isfinite(result).all()
            instead = 0.0 if before is None else before.to(residual)
            self._residuals[name] = torch.where(usual, residual, instead)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, by parameter name. Every rank saves its own."""
        return {"residuals": dict(self._residuals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._expect(state, ("residuals",))
        self._residuals = dict(state["residuals"])
