"""OuterSGD: the step that all ranks take together after their local steps (DiLoCo).

How far the ranks have moved since the last synchronisation, on average and with its sign turned
round, is a gradient: the *outer gradient*. `OuterSGD` is SGD with momentum on it. Used by
`horovod.torch.optimizers.fragments`; users pass one as ``DistributedOptimizer(..., outer=...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class OuterSGD:
    """SGD on outer gradients: how far all ranks have moved, on average, in their local steps.

    With ``lr=1`` and ``momentum=0`` a synchronisation averages the ranks' parameters.

    Args:
        lr: Learning rate of the outer step, 0.7 by default.
        momentum: Momentum of the outer step, 0.9 by default; 0 keeps no momentum.
        nesterov: Whether momentum is Nesterov's, as it is by default.

    Examples:
        >>> hvd.DistributedOptimizer(optimizer, local_steps=50, outer=hvd.OuterSGD(lr=0.7))
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def check(self) -> None:
        """Raise ValueError for numbers with which nothing can be trained."""
        lr: Any = self.lr
        momentum: Any = self.momentum
        if not isinstance(lr, (int, float)) or not 0 < lr < float("inf"):
            raise ValueError(f"lr of hvd.OuterSGD must be a positive number, not {lr!r}")
        if not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
            raise ValueError(
                f"momentum of hvd.OuterSGD must be at least 0 and less than 1, not {momentum!r}"
            )

    def update(
        self, anchor: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor | None
    ) -> None:
        """Move `anchor` against `gradient`, the outer one, which may be overwritten.

        `momentum` is what the outer step before left, zeros before the first; it is changed in
        place, and None where there is none to keep.
        """
        if momentum is not None:
            momentum.mul_(self.momentum).add_(gradient)
            if self.nesterov:
                gradient.add_(momentum, alpha=self.momentum)
            else:
                gradient = momentum
        anchor.add_(gradient, alpha=-self.lr)


AVERAGING = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
