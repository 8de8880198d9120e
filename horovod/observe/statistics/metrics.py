"""Check what scripts pass to `hvd.stats.log()`. `process` uses this."""

from __future__ import annotations

import numbers
import operator
from typing import Any

LONGEST_NAME = 200  # characters of a metric's name


def check_name(name: Any) -> str:
    """Return the name of a metric; ValueError if it cannot be one."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"the name of a metric must be text, not {name!r:.100}")
    if len(name) > LONGEST_NAME:
        raise ValueError(
            f"the name of a metric has {LONGEST_NAME} characters at most; "
            f"{name[:40]!r}... has {len(name)}"
        )
    return name


def check_number(name: str, value: Any) -> float:
    """Return a number, or the only element of a tensor of any framework; ValueError otherwise."""
    found = value
    try:
        for method in ("item", "asscalar", "numpy"):  # torch, numpy, JAX; MXNet; TensorFlow
            if not isinstance(found, numbers.Real) and callable(getattr(found, method, None)):
                found = getattr(found, method)()
        found = found.item() if hasattr(found, "item") else found
        if isinstance(found, numbers.Real):
            return float(found)
    except OverflowError:
        return float("inf") if found > 0 else float("-inf")
    except Exception as error:
        raise ValueError(
            f"metric {name!r}: {type(value).__name__} is not one number: {error}"
        ) from error
    raise ValueError(
        f"metric {name!r} must be a number or a tensor of one element, not "
        f"{type(value).__name__}: {value!r:.100}"
    )


def check_step(step: Any) -> int:
    """Return the number of a step; ValueError if it is none."""
    try:
        number = operator.index(step)
    except TypeError:
        raise ValueError(f"step must be a whole number, not {step!r:.100}") from None
    if number < 0:
        raise ValueError(f"step must not be negative: {number}")
    return number
