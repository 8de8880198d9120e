"""What the gradients of collectives share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from horovod.jax.call import Call


def backward(call: Call) -> Call:
    """The call that carries the gradients of this one."""
    name = None if call.name is None else f"{call.name}.grad"
    return dataclasses.replace(call, name=name, labels=(), size=None, ends_step=False)


def for_floats(function: Callable[[list[Any]], list[Any]], gradients: list[Any]) -> list[Any]:
    """Gradients for the inputs: of those that have any, `function(gradients)`.

    All ranks must make the same calls, so these are the arrays whose type allows a gradient.
    """
    chosen = [i for i, each in enumerate(gradients) if each.dtype != jax.dtypes.float0]
    results: list[Any] = list(gradients)
    if chosen:
        made = function([gradients[index] for index in chosen])
        for index, result in zip(chosen, made, strict=True):
            results[index] = result
    return results


def floats(others: list[Any], gradients: list[Any]) -> list[tuple[Any, Any]]:
    """Those of `others` whose gradient takes part, and the gradient."""
    pairs = zip(others, gradients, strict=True)
    return [(other, each) for other, each in pairs if each.dtype != jax.dtypes.float0]


def shapes_only(arrays: list[Any]) -> list[Any]:
    """What tells the number of rows in the backward pass, where only arrays can be handed on."""
    return [jnp.zeros((*array.shape[:1], 0)) for array in arrays]
