"""Reducing tensors element by element, in rank order. Used where a transport does the arithmetic.

The order of operands is always rank 0, 1, 2, ..., whichever rank computes. So a result does not
depend on how the work was split, and is bitwise the same everywhere.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from horovod.common.reduce_op import ReduceOp

K = TypeVar("K")
V = TypeVar("V")

# Of tensors and of numpy's arrays. numpy's kernels are as fast as torch's, and calling one costs a
# fraction of calling torch's. That counts for blocks that take some tens of microseconds. numpy has
# no bfloat16, and a slow float16.
_COMBINE: dict[ReduceOp, tuple[Callable[..., Any], Callable[..., Any]]] = {
    ReduceOp.SUM: (torch.add, np.add),
    ReduceOp.MIN: (torch.minimum, np.minimum),
    ReduceOp.MAX: (torch.maximum, np.maximum),
    ReduceOp.PRODUCT: (torch.mul, np.multiply),
}

# Gradients overflow during loss scaling, and the user's code expects it: no warnings from here.
ignore_overflow = np.errstate(over="ignore", invalid="ignore")

_HALF = (torch.float16, torch.bfloat16)

# The types whose arithmetic numpy does here, as numpy calls them.
NUMPY_TYPES: dict[torch.dtype, Any] = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float32", "float64", "complex64", "complex128"),
    )
}

_MOST_ENTRIES = 256  # of a `BoundedCache`
_BEGIN = 4096  # the first page is never mapped
_END = 1 << 48  # beyond what a process is given unless it asks for more


class BoundedCache(dict[K, V]):
    """What is remembered of earlier collectives: a new entry takes the place of the oldest."""

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= _MOST_ENTRIES:
            del self[next(iter(self))]
        super().__setitem__(key, value)


def combination(blocks: Any, op: ReduceOp) -> Callable[..., Any]:
    """Return the function that combines two blocks of this kind (`as_blocks`) into ``out=``."""
    return _COMBINE[op][isinstance(blocks, np.ndarray)]


def as_blocks(tensor: torch.Tensor) -> Any:
    """Return the tensor, or its memory as a numpy array where arithmetic is faster on that."""
    return tensor if tensor.dtype in _HALF else tensor.numpy()


def arrays_at(
    dtype: torch.dtype, addresses: Sequence[int], counts: Sequence[int]
) -> list[np.ndarray[Any, Any]] | None:
    """Return this process's memory at each address as an array, or None if that is not possible.

    Getting an array from a tensor takes some microseconds, which for the gradients of a model add
    up to a good part of the time to reduce them. Slicing an array that covers all memory takes a
    fraction of a microsecond. Such an array owns nothing: the caller must keep the tensor alive.

    There are none for a type whose arithmetic wants tensors (`as_blocks`), for an address that is
    not a multiple of an element's size, and beyond the memory that we cover.

    Args:
        dtype: The type of the elements.
        addresses: The addresses at which the arrays begin.
        counts: The number of elements of each.
    """
    memory, width = _all_memory(dtype), dtype.itemsize
    if memory is None:
        return None
    views = []
    for address, count in zip(addresses, counts, strict=True):
        start, rest = divmod(address - _BEGIN, width)
        if rest or address + count * width > _END:
            return None
        views.append(memory[start : start + count])
    return views


@functools.cache
def _all_memory(dtype: torch.dtype) -> np.ndarray[Any, Any] | None:
    """Return the whole address space as an array; None for types that arithmetic wants as tensors.

    Only mapped addresses may be touched.
    """
    example = as_blocks(torch.empty(0, dtype=dtype))
    if not isinstance(example, np.ndarray):
        return None
    memory = (ctypes.c_byte * (_END - _BEGIN)).from_address(_BEGIN)
    return np.frombuffer(memoryview(memory), example.dtype)


def tensor_operands(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return all elements of each tensor, as operands of arithmetic."""
    counts = [tensor.numel() for tensor in tensors]
    arrays = arrays_at(tensors[0].dtype, [t.data_ptr() for t in tensors], counts)
    return arrays if arrays is not None else [as_blocks(tensor.view(-1)) for tensor in tensors]


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
