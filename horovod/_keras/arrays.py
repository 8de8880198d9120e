"""Converts numpy arrays to torch tensors and back, including bfloat16, which numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def to_torch(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory, or a copy if that is not writeable."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        if array.flags.owndata and array.flags.c_contiguous:
            array.setflags(write=True)  # the memory belongs to this array alone
        else:
            array = np.array(array, order="C")
    if array.dtype.name == "bfloat16":  # a type of another package (ml_dtypes), unknown to torch
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor, like: Array) -> Array:
    """Return an array that shares the tensor's memory and has the dtype of `like`."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(like.dtype)
    return tensor.numpy()
