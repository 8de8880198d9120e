"""This process's memory as numpy arrays, by address. Used by the shared-memory transport.

Getting an array from a tensor takes some microseconds, which for the gradients of a model add up to
a good part of reducing them. A slice of an array that covers all memory takes a fraction of one.
Such an array owns nothing: whoever uses it sees to it that the tensor lives.
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
    """So many elements at each address, or None if there can be no such arrays.

    That is so for a type whose arithmetic wants tensors (`as_blocks`), and where an address is not
    a multiple of an element's size, or beyond all that we cover.
    """
    memory, width = _everything(dtype), dtype.itemsize
    if memory is None:
        return None
    found = []
    for address, count in zip(addresses, counts, strict=True):
        start, rest = divmod(address - _BEGIN, width)
        if rest or address + count * width > _END:
            return None
        found.append(memory[start : start + count])
    return found


@functools.cache
def _everything(dtype: torch.dtype) -> np.ndarray[Any, Any] | None:
    example = as_blocks(torch.empty(0, dtype=dtype))
    if not isinstance(example, np.ndarray):
        return None
    memory = (ctypes.c_byte * (_END - _BEGIN)).from_address(_BEGIN)
    return np.frombuffer(memoryview(memory), example.dtype)
