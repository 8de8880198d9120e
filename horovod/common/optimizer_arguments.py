"""Checks the arguments that distributed optimizers and tapes of several bindings share."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from horovod.common.reduce_op import Average, ReduceOp


def check_passes(backward_passes_per_step: Any) -> None:
    """Raise ValueError if the number of backward passes is not a positive integer."""
    passes = backward_passes_per_step
    if isinstance(passes, bool) or not isinstance(passes, Integral) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be positive, not {passes!r}")


def predivide_factors(gradient_predivide_factor: float, op: ReduceOp) -> tuple[float, float]:
    """Return the factors for gradients before and after the sum.

    Args:
        gradient_predivide_factor: Divide gradients by this factor before the sum and by
            `size / factor` after it.
        op: The operation. With `Average` the engine itself divides by `size`.

    Returns:
        The prescale factor and the postscale factor.

    Raises:
        ValueError: The factor is not positive, or is not 1 and the operation is not `Average`.
    """
    factor = gradient_predivide_factor
    if not factor > 0:
        raise ValueError(f"gradient_predivide_factor must be a positive number, not {factor!r}")
    if factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    return 1.0 / factor, factor


def check_groups(groups: Any, members: str = "variables") -> int | list[list[Any]] | None:
    """Return `groups` as None, a positive number or a list of lists; ValueError if it is not.

    `members` is what the error calls the members of a group.
    """
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if isinstance(groups, list) and all(isinstance(group, (list, tuple)) for group in groups):
        return [list(group) for group in groups]
    if groups is None:
        return None
    raise ValueError(
        f"groups must be a positive number or a list of lists of {members}, not {groups!r}"
    )
