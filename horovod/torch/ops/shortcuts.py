"""Calls of our operators that go past torch's dispatcher.

Compiled code calls an operator through the dispatcher, which turns every argument into a value of
C++ and back before it comes to our kernel. That takes 8 microseconds, and several times as many
where other programs have used the core's caches while the ranks waited for each other: more than
all else that a repeated small allreduce does. `operator_kernels` lets the operators for small
allreduces skip the dispatcher where it could do nothing but call the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    _are_functorch_transforms_active,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)


def shorten(operator: Any, repeat: Callable[..., bool]) -> None:
    """Let calls of an operator try a function before they enter the dispatcher.

    This must come before anything else uses the operator, because its hash changes.

    Args:
        operator: The overload. Its first argument, ``tensors``, is a list of tensors.
        repeat: Function that is called with the same arguments if nobody else is interested in the
            call: the list has one ordinary tensor, which needs no gradient, and no mode or
            transform of torch is active. If it returns False, it must have done nothing that the
            operator does not do again; the operator is then called as ever.
    """
    dispatch = operator._op

    def call(*arguments: Any, **named: Any) -> Any:
        tensors = arguments[0] if arguments else named["tensors"]
        if _is_ordinary(tensors) and repeat(*arguments, **named):
            return None
        return dispatch(*arguments, **named)

    operator._op = call


def _is_ordinary(tensors: Any) -> bool:
    """Return whether this is a list of one tensor, and the dispatcher would go to our kernel."""
    if type(tensors) is not list or len(tensors) != 1 or type(tensors[0]) is not torch.Tensor:
        return False
    return not (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _are_functorch_transforms_active()
        or torch._is_functional_tensor(tensors[0])
        or tensors[0].requires_grad
    )
