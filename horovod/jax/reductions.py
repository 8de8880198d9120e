"""allreduce and reducescatter in all their forms, of arrays and of whole trees.

Exported to users by `horovod.jax`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import reduction_input
from horovod.engine.runtime import runtime
from horovod.jax import dispatch
from horovod.jax.call import Call
from horovod.jax.compression import Compression, Compressor
from horovod.jax.derivatives import backward, floats, for_floats, shapes_only
from horovod.jax.trees import Leaves, flatten


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array, or all leaves of a tree as one operation, over all ranks. Differentiable."""
    leaves = flatten(tensor)
    call = _call(leaves, name, op, average, prescale_factor, postscale_factor, process_set)
    return _reduced_tree(call, leaves, compression)


def reduce_gradients(
    gradients: Any,
    name: str | None,
    compression: type[Compressor],
    op: ReduceOp,
    predivide: float,
    process_set: ProcessSet,
) -> Any:
    """Reduce the tree of a step's gradients."""
    leaves = flatten(gradients)
    call = _call(leaves, name, op, None, 1.0 / predivide, predivide, process_set)
    return _reduced_tree(dataclasses.replace(call, ends_step=True), leaves, compression)


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing an array or a tree; returns a handle for `poll` and `synchronize`."""
    leaves = flatten(tensor)
    call = _call(leaves, name, op, average, prescale_factor, postscale_factor, process_set)
    if not leaves.arrays:
        raise ValueError("there is no array in the tree")
    return dispatch.start(call, leaves.arrays, leaves.rebuilt)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several arrays as one operation. Differentiable."""
    group = check_group(tensors)
    terms = op, prescale_factor, postscale_factor, process_set
    return list(allreduce(group, average, name, compression, *terms))


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several arrays as one operation; returns one handle."""
    group = check_group(tensors)
    return allreduce_async(group, average, name, op, prescale_factor, postscale_factor, process_set)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce an array, or the leaves of a tree, and keep this rank's rows. Differentiable.

    Rows are dealt out as evenly as possible, the first ranks getting one more.
    """
    leaves = flatten(tensor)
    call = _scatter_call(leaves, name, op, process_set, prescale_factor, postscale_factor)
    pairs = [compression.compress(array) for array in leaves.arrays]
    scattered = _scattered(call, [array for array, _ in pairs]) if pairs else []
    return leaves.rebuilt(
        compression.decompress(array, context)
        for array, (_, context) in zip(scattered, pairs, strict=True)
    )


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter; returns a handle for `poll` and `synchronize`."""
    leaves = flatten(tensor)
    call = _scatter_call(leaves, name, op, process_set, prescale_factor, postscale_factor)
    return dispatch.start(call, leaves.arrays, leaves.rebuilt)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several arrays as one operation. Differentiable."""
    group = check_group(tensors)
    factors = prescale_factor, postscale_factor
    return list(reducescatter(group, name, compression, op, process_set, *factors))


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing and scattering several arrays as one operation; returns one handle."""
    group = check_group(tensors)
    return reducescatter_async(group, name, op, process_set, prescale_factor, postscale_factor)


def average_metrics(
    metrics: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The averages over the ranks of a tree of numbers, as floats, with one operation.

    Inside of jit they are arrays.
    """
    leaves = flatten(metrics)
    floats = [
        array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.float32)
        for array in leaves.arrays
    ]
    averages = allreduce(leaves.rebuilt(floats), name=name, op=Average, process_set=process_set)
    if dispatch.is_traced(floats):
        return averages
    return jax.tree.map(lambda value: value.item() if jnp.ndim(value) == 0 else value, averages)


def check_group(tensors: Any) -> list[Any]:
    """The arrays of a grouped operation."""
    if hasattr(tensors, "dtype"):
        raise ValueError("a grouped operation takes a list of arrays, not one array")
    group = list(tensors)
    if not group:
        raise ValueError("a grouped operation needs at least one array")
    return group


# -- allreduce -------------------------------------------------------------------------------


def _call(
    leaves: Leaves,
    name: str | None,
    op: ReduceOp | None,
    average: bool | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Call:
    op = resolve_reduce_op(op, average)
    call = Call.of(
        "allreduce",
        process_set,
        name=name,
        op=op,
        prescale=float(prescale),
        postscale=float(postscale),
        labels=leaves.labels,
    )
    _check_types(call, leaves.arrays)
    return call


def _check_types(call: Call, arrays: Sequence[Any]) -> None:
    """ValueError where a reduction is not defined for an array's type, before anything is sent."""
    runtime.group(call.set_id)  # says if Horovod is not initialised
    for name in {array.dtype.name for array in arrays}:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"arrays of type {name} cannot be sent")
        reduction_input(torch.empty(0, dtype=dtype), call.reduction, call.is_scaled)


def _reduced_tree(call: Call, leaves: Leaves, compression: type[Compressor]) -> Any:
    pairs = [compression.compress(array) for array in leaves.arrays]
    reduced = _reduced(call, [array for array, _ in pairs])
    return leaves.rebuilt(
        compression.decompress(array, context)
        for array, (_, context) in zip(reduced, pairs, strict=True)
    )


def _reduced(call: Call, arrays: list[Any]) -> list[Any]:
    if not arrays:
        return []
    if not dispatch.is_traced(arrays):
        return dispatch.run_now(call, arrays)
    is_alone = not runtime.is_elastic() and runtime.group(call.set_id).size == 1
    if is_alone and not (call.ends_step and runtime.config.stats_interval is not None):
        factor = call.prescale * call.postscale
        return arrays if factor == 1.0 else [(a * factor).astype(a.dtype) for a in arrays]
    return list(_traced_reduction(call, arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _traced_reduction(call: Call, arrays: list[Any]) -> list[Any]:
    return dispatch.run(call, arrays)


def _reduction_forward(call: Call, arrays: list[Any]) -> tuple[list[Any], None]:
    return dispatch.run(call, arrays), None


def _reduction_backward(call: Call, _: None, gradients: list[Any]) -> tuple[list[Any]]:
    """The gradients are reduced in the same way, whatever the operator: upstream's convention."""
    return (for_floats(functools.partial(dispatch.run, backward(call)), gradients),)


_traced_reduction.defvjp(_reduction_forward, _reduction_backward)


# -- reducescatter ---------------------------------------------------------------------------


def _scatter_call(
    leaves: Leaves,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
) -> Call:
    call = Call.of(
        "reducescatter",
        process_set,
        name=name,
        op=resolve_reduce_op(op, None),
        prescale=float(prescale),
        postscale=float(postscale),
        labels=leaves.labels,
    )
    _check_types(call, leaves.arrays)
    return call


def _share(array: Any, rank: int, size: int) -> tuple[int, ...]:
    if array.ndim == 0:
        raise ValueError("reducescatter needs at least one dimension, got a scalar")
    each, extra = divmod(array.shape[0], size)
    return each + (rank < extra), *array.shape[1:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _traced_scatter(call: Call, arrays: list[Any]) -> list[Any]:
    return dispatch.run_sized(call, arrays, _share)


def _scatter_forward(call: Call, arrays: list[Any]) -> tuple[list[Any], list[Any]]:
    return dispatch.run_sized(call, arrays, _share), shapes_only(arrays)


def _scatter_backward(call: Call, like: list[Any], gradients: list[Any]) -> tuple[list[Any]]:
    """The gradients are gathered; a Sum counts once for every rank of the set: upstream's
    convention."""
    factor = call.prescale * call.postscale
    if call.reduction is Sum:
        factor *= runtime.group(call.set_id).size
    gather = dataclasses.replace(backward(call), kind="allgather", prescale=1.0, postscale=1.0)
    rows = iter([each.shape[0] for each, _ in floats(like, gradients)])

    def gathered(arrays: list[Any]) -> list[Any]:
        made = dispatch.run_sized(
            gather, arrays, lambda array, *_: (next(rows), *array.shape[1:]), exact=False
        )
        return [each * factor for each in made]

    return (for_floats(gathered, gradients),)


_traced_scatter.defvjp(_scatter_forward, _scatter_backward)


def _scattered(call: Call, arrays: list[Any]) -> list[Any]:
    if not dispatch.is_traced(arrays):
        return dispatch.run_now(call, arrays)
    return list(_traced_scatter(call, arrays))
