"""Reducing tensors element by element, in rank order. Used where a transport does the arithmetic.

The order of operands is always rank 0, 1, 2, ..., whoever computes, so a result does not depend on
how the work was split, and is bitwise the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from horovod.common.reduce_op import ReduceOp

COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}

_HALF = (torch.float16, torch.bfloat16)


def needs_wide(dtype: torch.dtype, op: ReduceOp, operands: int) -> bool:
    """Whether to accumulate in fp32: half precision would round after every operand."""
    return operands > 2 and dtype in _HALF and op in (ReduceOp.SUM, ReduceOp.PRODUCT)


def reduce_into(output: torch.Tensor, operands: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """output = operands[0] op operands[1] op ...; `output` may be one of them."""
    if len(operands) == 1:
        output.copy_(operands[0])
        return
    combine = COMBINE[op]
    if len(operands) == 2:
        combine(operands[0], operands[1], out=output)
        return
    if needs_wide(output.dtype, op, len(operands)):
        total = operands[0].float()
    else:
        total = operands[0].clone()
    for operand in operands[1:]:
        combine(total, operand, out=total)
    output.copy_(total)
