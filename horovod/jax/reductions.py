"""Reduce arrays and whole trees over all ranks; `horovod.jax` exports the functions to users."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from horovod.common import compression as compress
from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import reduction_inputs
from horovod.engine.collective import Reduction
from horovod.engine.runtime import runtime
from horovod.jax.call import Call, Phase
from horovod.jax.compiled import dispatch
from horovod.jax.compression import Compression, Compressor
from horovod.jax.derivatives import Run, differentiable
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
    """Reduce an array, or all leaves of a tree, over all ranks. Differentiable.

    Args:
        tensor: Array, or tree of arrays, with the same structure, shapes and types on all ranks.
            The leaves of a tree travel as one operation.
        average: Deprecated form of `op`: True means `Average`, False means `Sum`. Give only one of
            the two.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        compression: Compressor for what travels between the ranks, such as `Compression.fp16`. By
            default nothing is compressed.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`. None means `Average`.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A new array or tree like `tensor`, with the same bits on all ranks.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: The ranks passed different arguments under this name, or a rank was
            lost. Inside `jax.jit` it is a `jax.errors.JaxRuntimeError` with the same text.

    Examples:
        >>> loss = hvd.allreduce(loss, name="loss")
        >>> sums = hvd.allreduce({"hits": hits, "rows": rows}, op=hvd.Sum)
    """
    leaves = flatten(tensor)
    op = resolve_reduce_op(op, average)
    call = make_call("allreduce", leaves, name, op, process_set, prescale_factor, postscale_factor)
    return run_compressed(_reduce, call, leaves, compression)


def reduce_gradients(gradients: Any, options: OptimizerOptions) -> Any:
    """Reduce the tree of a step's gradients; ranks outside the process set keep theirs."""
    process_set = options.process_set
    if process_set is not global_process_set and process_set.included() is False:
        return gradients
    leaves = flatten(gradients)
    factors = options.predivide_factors
    call = make_call("allreduce", leaves, options.name, options.op, process_set, *factors)
    call = dataclasses.replace(call, ends_step=True)
    return run_compressed(_reduce, call, leaves, options.compression)


def average_in_phase(
    arrays: list[Any],
    numbers: Any,
    name: str,
    compression: type[Compressor],
    process_set: ProcessSet,
    phase: Phase,
) -> list[Any]:
    """Average a list of arrays in two calls, inside or outside of a program.

    Args:
        arrays: What this rank sends, the same in both calls.
        numbers: Two integers: one of the caller in this process, and one that both calls share with
            no other calls of this caller and name.
        name: Name by which the ranks match this operation.
        compression: Compressor for what travels between the ranks.
        process_set: Ranks that take part.
        phase: "start" or "finish"; "whole" for a single call, which does both.

    Returns:
        The arrays themselves from the start, their averages otherwise.
    """
    leaves = flatten(arrays)
    call = make_call("allreduce", leaves, name, Average, process_set)
    if phase == "whole":
        return list(run_compressed(_reduce, call, leaves, compression))
    pairs = [compression.compress(array) for array in leaves.arrays]
    given = [numbers, *(array for array, _ in pairs)]
    _, *results = dispatch.run(dataclasses.replace(call, phase=phase), given)
    if phase == "start":
        return arrays
    contexts = (context for _, context in pairs)
    return [compression.decompress(*both) for both in zip(results, contexts, strict=True)]


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing an array or a tree over all ranks, and return at once.

    It cannot be called inside `jax.jit`: XLA starts the calls of a compiled program itself.

    Args:
        tensor: Array, or tree of arrays, with the same structure, shapes and types on all ranks.
            The leaves of a tree travel as one operation.
        average: Deprecated form of `op`: True means `Average`, False means `Sum`. Give only one of
            the two.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`. None means `Average`.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A handle for `poll` and `synchronize`. `synchronize` returns what `allreduce` returns, and
        raises what it raises.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
    """
    leaves = flatten(tensor)
    op = resolve_reduce_op(op, average)
    call = make_call("allreduce", leaves, name, op, process_set, prescale_factor, postscale_factor)
    if not leaves.arrays:
        raise ValueError("there is no array in the tree")
    return dispatch.start(call, leaves.arrays, leaves.rebuild)


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
    """Reduce several arrays over all ranks as one operation. Differentiable.

    Args:
        tensors: List of arrays or trees. They travel as one operation.
        average: Deprecated form of `op`: True means `Average`, False means `Sum`. Give only one of
            the two.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        compression: Compressor for what travels between the ranks, such as `Compression.fp16`. By
            default nothing is compressed.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`. None means `Average`.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A list with the reduced arrays, in the order of `tensors`.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: The ranks passed different arguments under this name, or a rank was
            lost. Inside `jax.jit` it is a `jax.errors.JaxRuntimeError` with the same text.
    """
    group = check_group(tensors)
    return list(
        allreduce(
            group,
            average,
            name,
            compression,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
        )
    )


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several arrays as one operation, and return at once.

    It cannot be called inside `jax.jit`: XLA starts the calls of a compiled program itself.

    Args:
        tensors: List of arrays or trees. They travel as one operation.
        average: Deprecated form of `op`: True means `Average`, False means `Sum`. Give only one of
            the two.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`. None means `Average`.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        One handle for `poll` and `synchronize`, which returns the list of reduced arrays.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
    """
    group = check_group(tensors)
    return allreduce_async(group, average, name, op, prescale_factor, postscale_factor, process_set)


def average_metrics(
    metrics: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Average a tree of numbers, such as a dict of metrics, over the ranks.

    Args:
        metrics: Tree of numbers or arrays. Integers and booleans are averaged as float32.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A tree of the same structure, with a Python float for each number. Inside `jax.jit` its
        leaves are arrays.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: The ranks passed different arguments under this name, or a rank was
            lost. Inside `jax.jit` it is a `jax.errors.JaxRuntimeError` with the same text.

    Examples:
        >>> metrics = hvd.average_metrics({"loss": loss, "accuracy": accuracy})
    """
    leaves = flatten(metrics)
    floats = [
        array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.float32)
        for array in leaves.arrays
    ]
    averages = allreduce(leaves.rebuild(floats), name=name, op=Average, process_set=process_set)
    if dispatch.is_traced(floats):
        return averages
    return jax.tree.map(lambda value: value.item() if jnp.ndim(value) == 0 else value, averages)


def check_group(tensors: Any) -> list[Any]:
    """Return the arrays of a grouped operation as a list; ValueError if there are none."""
    if hasattr(tensors, "dtype"):
        raise ValueError("a grouped operation takes a list of arrays, not one array")
    group = list(tensors)
    if not group:
        raise ValueError("a grouped operation needs at least one array")
    return group


def make_call(
    kind: str,
    leaves: Leaves,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call:
    """Return the record of a call that reduces; ValueError if an array cannot be reduced."""
    op = resolve_reduce_op(op, None)
    reduction = Reduction(op, float(prescale_factor), float(postscale_factor))
    call = Call.of(kind, process_set, name=name, reduction=reduction, labels=leaves.labels)
    check_types(call, leaves.arrays)
    return call


def check_types(call: Call, arrays: Sequence[Any]) -> None:
    """Raise ValueError if the operation refuses an array's type, before anything is sent."""
    runtime.group(call.set_id)  # raises an error if Horovod is not initialised
    for name in {array.dtype.name for array in arrays}:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"arrays of type {name} cannot be sent")
        reduction_inputs([torch.empty(0, dtype=dtype)], call.reduction)


def run_compressed(run: Run, call: Call, leaves: Leaves, compression: type[Compressor]) -> Any:
    """Run a call on the compressed leaves of a tree, and return the tree of its results."""
    results = compress.run_compressed(functools.partial(run, call), leaves.arrays, compression)
    return leaves.rebuild(results)


def _send_back_reduced(back: Call, gradients: list[Any], _: list[int]) -> list[Any]:
    """Reduce the gradients in the same way for every operation, by upstream's convention."""
    return reduce_differentiably(back, gradients)


reduce_differentiably = differentiable(dispatch.run, _send_back_reduced)


def _reduce(call: Call, arrays: list[Any]) -> list[Any]:
    """Reduce arrays, at once or as part of a program."""
    if not dispatch.is_traced(arrays):
        return dispatch.run_now(call, arrays) if arrays else []
    # In a program a single rank needs no call, unless the user wants its steps counted.
    is_single = not runtime.is_elastic() and runtime.group(call.set_id).size == 1
    if is_single and not (call.ends_step and runtime.config.stats_interval is not None):
        factor = call.reduction.prescale_factor * call.reduction.postscale_factor
        return arrays if factor == 1.0 else [(a * factor).astype(a.dtype) for a in arrays]
    return reduce_differentiably(call, arrays)
