"""Helpers for the gradients of collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from horovod.jax.call import Call


def backward(call: Call) -> Call:
    """Return the call that carries the gradients of this one."""
    name = None if call.name is None else f"{call.name}.grad"
    return dataclasses.replace(call, name=name, labels=(), size=None, ends_step=False)


def for_floats(function: Callable[[list[Any]], list[Any]], gradients: list[Any]) -> list[Any]:
    """Return gradients for the inputs, computed by `function(gradients)`.

    `function` gets those whose type allows a gradient, whether or not this rank needs them: all
    ranks must make the same calls.
    """
    indices = [i for i, each in enumerate(gradients) if each.dtype != jax.dtypes.float0]
    results: list[Any] = list(gradients)
    if indices:
        computed = function([gradients[index] for index in indices])
        for index, result in zip(indices, computed, strict=True):
            results[index] = result
    return results


def row_counts(row_markers: list[Any], gradients: list[Any]) -> list[int]:
    """Return the numbers of rows of the inputs whose type allows a gradient."""
    pairs = zip(row_markers, gradients, strict=True)
    return [marker.shape[0] for marker, each in pairs if each.dtype != jax.dtypes.float0]


def make_row_markers(arrays: list[Any]) -> list[Any]:
    """Return empty arrays with the arrays' numbers of rows, for the backward pass.

    JAX hands only arrays from the forward pass to the backward pass.
    """
    return [jnp.zeros((*array.shape[:1], 0)) for array in arrays]
