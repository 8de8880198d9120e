"""Reducing tensors element by element, in rank order. Used where a transport does the arithmetic.

The order of operands is always rank 0, 1, 2, ..., whichever rank computes. So a result does not
depend on how the work was split, and is bitwise the same everywhere.
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

# Gradients overflow during loss scaling, and the user's code expects it: no warnings from here.
ignore_overflow = np.errstate(over="ignore", invalid="ignore")

_HALF = (torch.float16, torch.bfloat16)

# The types whose arithmetic numpy does here (see ARRAY_COMBINE), as numpy calls them.
NUMPY_TYPES: dict[torch.dtype, Any] = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float32", "float64", "complex64", "complex128"),
    )
}

# numpy's kernels are as fast as torch's, and calling one costs a fraction of calling torch's. That
# counts for blocks that take some tens of microseconds. numpy has no bfloat16, and a slow float16.
ARRAY_COMBINE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def combination(blocks: Any, op: ReduceOp) -> Callable[..., Any]:
    """Return the function that combines two blocks of this kind (`as_blocks`) into ``out=``."""
    return (ARRAY_COMBINE if isinstance(blocks, np.ndarray) else COMBINE)[op]


def as_blocks(tensor: torch.Tensor) -> Any:
    """Return the tensor, or its memory as a numpy array where arithmetic is faster on that."""
    return tensor if tensor.dtype in _HALF else tensor.numpy()


def needs_wide(dtype: torch.dtype, op: ReduceOp, operands: int) -> bool:
    """Return whether to accumulate in fp32: half precision would round after every operand."""
    return operands > 2 and dtype in _HALF and op in (ReduceOp.SUM, ReduceOp.PRODUCT)


def reduce_into(output: Any, operands: Sequence[Any], op: ReduceOp, scratch: Any = None) -> None:
    """Compute operands[0] op operands[1] op ... into `output`, which may be one of them.

    All are tensors, or all are arrays (`as_blocks`). `scratch` has their size and saves an
    allocation.
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
