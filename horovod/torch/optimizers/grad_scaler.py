"""Making torch.amp.GradScaler decide alike on all ranks. Installed by DistributedOptimizer.

A scaler decides by the gradients whether to skip a step. Decided on each rank's own, some ranks
would step while others skip. So when it looks at the gradients of a DistributedOptimizer, they are
reduced first; where they stay local (op=Adasum), ranks share what the scaler found.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def reduce_before_unscaling() -> None:
    """Make torch.amp.GradScaler reduce gradients before it looks at them; once is enough."""
    scaler: Any = torch.amp.GradScaler
    unscale = scaler._unscale_grads_
    if getattr(unscale, "reduces_first", False):
        return

    @functools.wraps(unscale)
    def reduce_and_unscale(self: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        prepare = getattr(optimizer, "_prepare_for_scaler", None)
        if prepare is None:
            return unscale(self, optimizer, *arguments, **keywords)
        prepare()
        return optimizer._share_found(unscale(self, optimizer, *arguments, **keywords))

    reduce_and_unscale.reduces_first = True  # type: ignore[attr-defined]
    scaler._unscale_grads_ = reduce_and_unscale
