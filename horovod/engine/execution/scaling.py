"""Average and scale factors, which a reduction has besides a sum. Used where reductions run."""

from __future__ import annotations

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Reduction


def sum_and_scale(reduction: Reduction, size: int) -> tuple[ReduceOp, float]:
    """Return operator and factor as transports know them: an average is a scaled sum."""
    op, _, postscale_factor, _ = reduction
    if op is ReduceOp.AVERAGE:
        return ReduceOp.SUM, postscale_factor / size
    return op, postscale_factor


def is_inexact(tensor: torch.Tensor) -> bool:
    """Return whether its elements are rounded, so that transports may scale them."""
    return tensor.is_floating_point() or tensor.is_complex()


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers are multiplied in fp64 and truncated toward zero."""
    if factor == 1.0:
        return
    if is_inexact(tensor):
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.to(torch.float64).mul_(factor).trunc_())


def finish_(tensor: torch.Tensor, reduction: Reduction, size: int) -> None:
    """Turn a sum into what the caller asked for: average and post-scale factor."""
    op, _, postscale_factor, _ = reduction
    if op is not ReduceOp.AVERAGE:
        scale_(tensor, postscale_factor)
    elif is_inexact(tensor):
        scale_(tensor, postscale_factor / size)
    elif postscale_factor == 1.0:
        # Exact, where multiplying by the reciprocal would be one short for some sizes.
        tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))
    else:
        tensor.copy_(tensor.to(torch.float64).mul_(postscale_factor).div_(size).trunc_())


def identity_like(dtype: torch.dtype, op: ReduceOp) -> float | int | bool:
    """Return what a joined rank contributes: the value that changes nothing."""
    if op is ReduceOp.PRODUCT:
        return 1
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if dtype is torch.bool:
            return op is ReduceOp.MIN
        if dtype.is_floating_point:
            return float("inf") if op is ReduceOp.MIN else float("-inf")
        if dtype.is_complex:
            raise HorovodInternalError(f"{op.name} is not defined for {dtype}")
        limits = torch.iinfo(dtype)
        return limits.max if op is ReduceOp.MIN else limits.min
    return 0
