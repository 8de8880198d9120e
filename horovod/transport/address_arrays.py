"""This process's memory as numpy arrays, by address. Used by the CPU transports.

Getting an array from a tensor takes some microseconds, which for the gradients of a model add up to
a good part of the time to reduce them. Slicing an array that covers all memory takes a fraction of
a microsecond. Such an array owns nothing: the caller must keep the tensor alive.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod.transport.arithmetic import as_blocks

_BEGIN = 4096  # the first page is never mapped
_END = 1 << 48  # beyond what a process is given unless it asks for more


def arrays(
    dtype: torch.dtype, addresses: Sequence[int], counts: Sequence[int]
) -> list[np.ndarray[Any, Any]] | None:
    """Return an array for each address, or None if there can be no such arrays.

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
