"""Running a call on arrays: at once, in the background, or as part of a program being compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from horovod.engine.runtime import runtime
from horovod.jax import primitive
from horovod.jax.arrays import device_of, is_tracer, to_jax, to_torch
from horovod.jax.call import Call, Finish
from horovod.torch import handles

# Whether a program was traced whose shapes depend on the number of ranks (see elastic).
size_matters = False


def is_traced(arrays: Sequence[Any]) -> bool:
    return any(is_tracer(array) for array in arrays)


def run(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """Results with the shapes of the arrays, in their order."""
    if is_traced(arrays):
        return primitive.bind(call, arrays, [None] * len(arrays))
    return run_now(call, arrays)


def run_sized(
    call: Call,
    arrays: Sequence[Any],
    shape: Callable[[Any, int, int], tuple[int, ...]],
    exact: bool = True,
) -> list[Any]:
    """The same for results whose first dimension depends on the ranks.

    In a program that of a result is `shape(array, rank, size)`. With `exact` it follows from all
    ranks having arrays of one shape, and it is an error if they do not.
    """
    if not is_traced(arrays):
        return run_now(call, arrays)
    global size_matters
    size_matters = True
    group = runtime.group(call.set_id)
    call = dataclasses.replace(call, size=group.size)
    if exact:
        labels = call.labels or ("the array",) * len(arrays)
        shaped = zip(labels, arrays, strict=True)
        forms = tuple(f"{label} of shape {list(array.shape)}" for label, array in shaped)
        call = dataclasses.replace(call, labels=forms)
    shapes = [shape(array, group.rank, group.size) for array in arrays]
    return primitive.bind(call, arrays, shapes)


def run_now(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The results, when they are there."""
    primitive.wait_for_programs(call.name)
    request, finish = call.start(_tensors(arrays), background=False)
    made = request.wait()
    call.tell_step()
    return _finished(finish, made, arrays)


@primitive.collective.def_impl
def _run_primitive(*arrays: jax.Array, call: Call, forms: Any) -> list[jax.Array]:
    """Outside of jit, what vmap has made of a call runs at once, too."""
    return run_now(call, arrays)[: len(forms)]


def start(call: Call, arrays: Sequence[Any], result: Callable[[list[Any]], Any]) -> int:
    """A handle; `result(arrays)` makes what `synchronize` returns."""
    if is_traced(arrays):
        raise ValueError(
            "asynchronous collectives cannot be compiled: inside of jit call the form without "
            "_async, which XLA runs when it is due"
        )
    primitive.wait_for_programs(call.name)
    request, finish = call.start(_tensors(arrays))
    return handles.hand_out(request, lambda made: result(_finished(finish, made, arrays)))


def _tensors(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    return [to_torch(array) for array in arrays]


def _finished(finish: Finish, made: Any, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    results = finish(made)
    likes = [*arrays, *[None] * (len(results) - len(arrays))]
    return [
        _received(result, arrays[0]) if like is None else _typed(result, like)
        for result, like in zip(results, likes, strict=True)
    ]


def _typed(result: torch.Tensor, like: jax.Array) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.unsignedinteger):
        result = result.view(getattr(torch, like.dtype.name))
    return to_jax(result, like)


def _received(splits: torch.Tensor, like: jax.Array) -> jax.Array:
    return jnp.asarray(splits.tolist(), jnp.int32, device=device_of(like))
