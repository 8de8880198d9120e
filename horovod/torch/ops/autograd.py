"""Helpers of the differentiable collectives: is a gradient needed, and what is its name?"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """Return whether autograd, or a transform of `torch.func`, has to see what these tensors do."""
    if not is_compiling() and torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )


def is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def backward_name(name: str | None) -> str | None:
    """Return the name of the collective that carries the gradient of the one called `name`."""
    return None if name is None else f"{name}.grad"
