"""Reducing tensors element by element, in rank order. Used where a transport does the arithmetic.

The order of operands is always rank 0, 1, 2, ..., whoever computes, so a result does not depend on
how the work was split, and is bitwise the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from horovod.common.reduce_op import ReduceOp

COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}

# Gradients overflow in the course of loss scaling, which is nobody's business but the user's.
quietly = np.errstate(over="ignore", invalid="ignore")

_HALF = (torch.float16, torch.bfloat16)

# The types whose arithmetic numpy does here (see below), as numpy calls them.
NUMPY_TYPES: dict[torch.dtype, Any] = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float32", "float64", "complex64", "complex128"),
    )
}

# numpy calls the same kind of kernel at a fraction of torch's cost of getting there, which counts
# for blocks that take some tens of microseconds. It has no bfloat16, and a slow float16.
ARRAY_COMBINE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def combination(blocks: Any, op: ReduceOp) -> Callable[..., Any]:
    """How to combine two blocks of this kind (`as_blocks`): called with two and ``out=``."""
    return (ARRAY_COMBINE if isinstance(blocks, np.ndarray) else COMBINE)[op]


def as_blocks(tensor: torch.Tensor) -> Any:
    """What to cut blocks from: the tensor, or its memory as a numpy array if that is faster."""
    return tensor if tensor.dtype in _HALF else tensor.numpy()


def needs_wide(dtype: torch.dtype, op: ReduceOp, operands: int) -> bool:
    """Whether to accumulate in fp32: half precision would round after every operand."""
    return operands > 2 and dtype in _HALF and op in (ReduceOp.SUM, ReduceOp.PRODUCT)


def reduce_into(output: Any, operands: Sequence[Any], op: ReduceOp, scratch: Any = None) -> None:
    """output = operands[0] op operands[1] op ...; `output` may be one of them.

    All are tensors, or all are arrays (`as_blocks`). `scratch`, of their size, saves allocating.
    """
    if len(operands) == 1:
        output[:] = operands[0]
        return
    combine = combination(output, op)
    if len(operands) == 2:
        combine(operands[0], operands[1], out=output)
        return
    if needs_wide(output.dtype, op, len(operands)):
        total = operands[0].float()
        for operand in operands[1:]:
            combine(total, operand, out=total)
        output[:] = total
        return
    total = combine(operands[0], operands[1], out=scratch)
    for operand in operands[2:-1]:
        combine(total, operand, out=total)
    combine(total, operands[-1], out=output)
