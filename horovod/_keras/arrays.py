"""Numpy arrays as torch tensors and back, those of types that only one of them knows included."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def to_torch(array: Array) -> torch.Tensor:
    """A tensor with the memory of the array, or of a copy if that must not be written to."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        if array.flags.owndata and array.flags.c_contiguous:
            array.setflags(write=True)  # nobody else's memory
        else:
            array = np.array(array, order="C")
    if array.dtype.name == "bfloat16":  # numpy has it from elsewhere, and torch does not know it
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor, like: Array) -> Array:
    """The array with the tensor's memory, of the type that `like` has."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(like.dtype)
    return tensor.numpy()
