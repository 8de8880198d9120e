"""Makes an optimizer of a new class from a user's, and keeps schedulers of the old one right.

Used by `horovod.torch.optimizer` and by the optimizers beside this module.
"""

from __future__ import annotations

from typing import Any

import torch


def notify_scheduler(wrapped: Any) -> None:
    """Tell a scheduler that was made for the original optimizer that a step happens."""
    original = wrapped._original()
    if original is not None:
        original._opt_called = True


def share_groups(wrapped: Any) -> None:
    """Let a scheduler of the original set the learning rates of the groups that were loaded."""
    original = wrapped._original()
    if original is not None:
        original.param_groups, original.state = wrapped.param_groups, wrapped.state


def step_of(base: type[torch.optim.Optimizer]) -> Any:
    """Return the optimizer's step without torch's wrapper that calls step hooks."""
    step: Any = base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def new_optimizer(base: type, mixin: type) -> Any:
    """Return an empty instance of the class that derives from both."""
    made: Any = type(base.__name__, (mixin, base), {})
    return made.__new__(made)
