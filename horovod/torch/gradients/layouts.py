"""How the elements of parameters lie in memory. Used to reduce gradients and to cut parameters.

Ranks exchange elements in the order in which a parameter has them in memory, which is the same on
all ranks; a gradient or a loaded state may be laid out differently on each.
"""

from __future__ import annotations

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in some order."""
    expected = 1
    for extent, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def memory_shape(param: torch.Tensor) -> list[int]:
    """Return the dimensions of a dense parameter, outermost in memory first."""
    strides = param.stride()
    order = sorted(range(param.dim()), key=lambda dim: -strides[dim])
    return [param.shape[dim] for dim in order]


def laid_out_like(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` or a copy: dense, with elements where `param`, of its shape, has them."""
    if tensor.is_contiguous() and param.is_contiguous():
        return tensor
    if tensor.stride() == param.stride() and is_dense(tensor):
        return tensor  # e.g. channels last
    like = torch.empty_like(param, dtype=tensor.dtype, device=tensor.device)
    return like.detach().copy_(tensor)


def in_memory_order(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return `tensor` flat, its elements in the order in which `param`, of its shape, has them.

    It is the tensor's own memory where that is possible, otherwise a copy.
    """
    return flat(laid_out_like(param, tensor.detach()))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
