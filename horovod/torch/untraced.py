"""What torch.compile must not look into: see `untraced`. Used by the optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Let compiled code call the function as it is; what it calls is not compiled either.

    For what talks to other ranks. The mark loads the compiler, so it is not for modules that every
    program imports.
    """
    marked = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return cast("F", marked)
