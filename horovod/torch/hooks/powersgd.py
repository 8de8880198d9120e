"""PowerSGD: gradients travel as products of two thin matrices (Vogels et al., NeurIPS 2019)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from horovod.torch.hooks.base import GradientBucket
from horovod.torch.hooks.compressing import FeedbackHook, allreduce_traffic, precise

Tensor = torch.Tensor


@dataclass
class _Product:
    """A gradient on its way: an n x m matrix, about left (n x r) times right (m x r) transposed."""

    name: str
    gradient: Tensor
    matrix: Tensor
    left: Tensor
    right: Tensor


class PowerSGD(FeedbackHook):
    """Low-rank approximation of gradients by a power iteration, one step per reduction.

    A parameter of n rows and m columns (all dimensions but the first together) sends two matrices,
    of n x r and m x r elements, by an allreduce each. Vectors, and whatever this would not make
    smaller, travel as they are. The result is the mean gradient projected onto r directions, exact
    if it has no higher rank. Each iteration starts from the directions that the one before found.

    Every rank multiplies the matrices itself: for the same bits, ranks need the same kind of
    processor, torch and number of threads. With `hvd.join`, and in elastic training, leave
    start_iteration at 0: a rank that was not there has not counted the iterations.

    Args:
        matrix_approximation_rank: The number r of directions, 1 by default.
        start_iteration: The number of reductions in which a parameter is not compressed yet, as its
            gradient changes most at first; 0 by default.
        error_feedback: Whether what the projection leaves out is added to the next gradient.
    """

    def __init__(
        self,
        matrix_approximation_rank: int = 1,
        start_iteration: int = 0,
        error_feedback: bool = True,
    ) -> None:
        if not isinstance(matrix_approximation_rank, int) or matrix_approximation_rank < 1:
            raise ValueError(
                f"matrix_approximation_rank must be a number from 1, not "
                f"{matrix_approximation_rank}"
            )
        if start_iteration < 0:
            raise ValueError(f"start_iteration must not be negative, but is {start_iteration}")
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_iteration = start_iteration
        super().__init__(error_feedback)
        self._directions: dict[str, Tensor] = {}  # `right` of the last time, by parameter
        self._reductions: dict[str, int] = {}  # how many each parameter had, up to start_iteration

    def _compressed_traffic(self, shape: torch.Size, dtype: torch.dtype, num_ranks: int) -> float:
        if len(shape) < 2:
            return math.inf
        elements = (shape[0] + shape[1:].numel()) * self.matrix_approximation_rank
        return allreduce_traffic(elements * precise(dtype).itemsize, num_ranks)

    def start(self, bucket: GradientBucket) -> Callable[[], None]:
        products: list[_Product] = []
        plain: list[Tensor] = []
        counted: list[str] = []
        worthwhile = self._worthwhile(bucket)
        for index, (name, gradient) in enumerate(zip(bucket.names, bucket.gradients, strict=True)):
            if worthwhile[index] and self._reductions.get(name, 0) >= self.start_iteration:
                products.append(self._product(name, gradient, bucket.shapes[index]))
                continue
            plain.append(gradient)
            if worthwhile[index]:
                counted.append(name)
        wait = bucket.allreduce([*plain, *(product.left for product in products)])

        def finish() -> None:
            wait()
            for name in counted:
                self._reductions[name] = self._reductions.get(name, 0) + 1
            if products:
                self._finish(bucket, products)

        return finish

    def _product(self, name: str, gradient: Tensor, shape: torch.Size) -> _Product:
        matrix = self._corrected(name, gradient).view(shape[0], -1)
        right = self._directions.get(name)
        if right is None:
            right = _random_directions(name, matrix.shape[1], self.matrix_approximation_rank)
        elif right.shape != (matrix.shape[1], self.matrix_approximation_rank):
            raise ValueError(
                f"{self!r} has directions of shape {list(right.shape)} for parameter {name!r} of "
                f"shape {list(shape)}: was another model's state loaded?"
            )
        right = right.to(matrix)
        # Orthonormal, so that tiny and huge gradients stay in range.
        left = matrix @ torch.linalg.qr(right).Q
        return _Product(name, gradient, matrix, left, right)

    def _finish(self, bucket: GradientBucket, products: list[_Product]) -> None:
        before = [product.right for product in products]
        for product in products:
            # Equal inputs in equally aligned memory: the same bits on all ranks.
            product.left = torch.linalg.qr(product.left).Q
            product.right = product.matrix.t() @ product.left
        bucket.allreduce([product.right for product in products], ".right")()
        share = 1 / (bucket.num_ranks * bucket.scale)  # the part of the result that is a rank's own
        for product, earlier in zip(products, before, strict=True):
            result = (product.left @ product.right.t()).view(-1)
            product.gradient.copy_(result)
            applied = product.gradient.to(result.dtype)  # after rounding
            residual = product.matrix.view(-1).sub_(applied, alpha=share)
            self._keep(product.name, residual, product.gradient)
            # A direction without a gradient, or with a NaN, is useless: keep the earlier one.
            right = product.right
            useful = torch.isfinite(right).all(0) & (right != 0).any(0)
            self._directions[product.name] = torch.where(useful, right, earlier)

    def state_dict(self) -> dict[str, Any]:
        """Return residuals (this rank's), directions and counts (all ranks'), by parameter name."""
        return {
            **super().state_dict(),
            "directions": dict(self._directions),
            "reductions": dict(self._reductions),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._expect(state, ("residuals", "directions", "reductions"))
        super().load_state_dict({"residuals": state["residuals"]})
        self._directions = dict(state["directions"])
        self._reductions = dict(state["reductions"])


def _random_directions(name: str, num_rows: int, rank: int) -> Tensor:
    """Return the first directions: the same on all ranks, different for each parameter."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    return torch.randn(num_rows, rank, generator=torch.Generator().manual_seed(seed))
