"""Runs a call on arrays: at once, in the background, or as part of a program being traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from horovod.engine.runtime import runtime
from horovod.jax.arrays import device_of, is_tracer, to_jax, to_torch
from horovod.jax.call import Call, Finish
from horovod.jax.compiled import primitive
from horovod.torch.ops import handles

# Whether a program was traced whose shapes depend on the number of ranks. `elastic` then clears
# JAX's caches when that number changes.
has_sized_programs = False


def is_traced(arrays: Sequence[Any]) -> bool:
    """Return whether any of the arrays belongs to a program that JAX is tracing."""
    return any(is_tracer(array) for array in arrays)


def run(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """Run a call whose results have the shapes of the arrays."""
    if is_traced(arrays):
        return primitive.bind(call, arrays, [None] * len(arrays))
    return run_now(call, arrays)


def run_sized(
    call: Call,
    arrays: Sequence[Any],
    shape: Callable[[Any, int, int], tuple[int, ...]],
    exact: bool = True,
) -> list[Any]:
    """Run a call whose results' first dimension depends on the ranks.

    Args:
        call: The call.
        arrays: The inputs.
        shape: A function of an array, the rank and the size; it returns the shape of the result in
            a program.
        exact: Whether that shape is right only if all ranks pass arrays of the same shape, so that
            other shapes are an error; True by default.

    Returns:
        The results.
    """
    if not is_traced(arrays):
        return run_now(call, arrays)
    global has_sized_programs
    has_sized_programs = True
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
    """Run a call, wait for it, and return its results."""
    primitive.wait_for_programs(call.name)
    if call.phase != "whole":
        sources = _tensors(arrays)
        targets = [torch.empty_like(source) for source in sources]
        call.run_compiled(sources, targets)
        return _to_arrays(list, targets, arrays)
    request, finish = call.start(_tensors(arrays), background=False)
    result = request.wait()
    call.count_step()
    return _to_arrays(finish, result, arrays)


@primitive.collective.def_impl
def _run_primitive(*arrays: jax.Array, call: Call, forms: Any) -> list[jax.Array]:
    """Run a call that vmap has rewritten outside `jax.jit`."""
    return run_now(call, arrays)[: len(forms)]


def start(call: Call, arrays: Sequence[Any], result: Callable[[list[Any]], Any]) -> int:
    """Start a call, and return a handle; `synchronize` returns `result(arrays)`."""
    if is_traced(arrays):
        raise ValueError(
            "asynchronous collectives cannot be compiled: inside of jit call the form without "
            "_async, which XLA runs when it is due"
        )
    primitive.wait_for_programs(call.name)
    request, finish = call.start(_tensors(arrays))
    return handles.hand_out(request, lambda made: result(_to_arrays(finish, made, arrays)))


def _tensors(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    return [to_torch(array) for array in arrays]


def _to_arrays(finish: Finish, result: Any, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Turn the result of a request into arrays like the inputs, and the splits of an alltoall."""
    tensors = finish(result)
    results = [_to_array(tensor, like) for tensor, like in zip(tensors, arrays, strict=False)]
    for splits in tensors[len(arrays) :]:
        results.append(jnp.asarray(splits.tolist(), jnp.int32, device=device_of(arrays[0])))
    return results


def _to_array(result: torch.Tensor, like: jax.Array) -> jax.Array:
    """Return an array with the type and device of `like`; unsigned types travel as signed."""
    if jnp.issubdtype(like.dtype, jnp.unsignedinteger):
        result = result.view(getattr(torch, like.dtype.name))
    return to_jax(result, like)
