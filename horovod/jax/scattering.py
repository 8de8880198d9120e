"""Reduce and scatter arrays and whole trees; `horovod.jax` exports the functions to users."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.engine.collective import Reduction
from horovod.engine.runtime import runtime
from horovod.jax.call import Call
from horovod.jax.compiled import dispatch
from horovod.jax.compression import Compression, Compressor
from horovod.jax.derivatives import differentiable
from horovod.jax.reductions import check_group, make_call, run_compressed
from horovod.jax.trees import flatten


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce an array over all ranks and keep this rank's rows. Differentiable.

    The rows of the first dimension are divided as evenly as possible; if their number is not
    divisible, the first ranks get one row more.

    Args:
        tensor: Array, or tree of arrays, of at least one dimension, with the same shapes and types
            on all ranks. The leaves of a tree travel as one operation.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        compression: Compressor for what travels between the ranks, such as `Compression.fp16`. By
            default nothing is compressed.
        op: `Average` (the default) or `Sum`.
        process_set: Ranks that take part. By default all ranks do.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.

    Returns:
        This rank's rows of the result, as an array or a tree like `tensor`.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: The ranks passed different arguments under this name, or a rank was
            lost. Inside `jax.jit` it is a `jax.errors.JaxRuntimeError` with the same text.

    Examples:
        >>> own_rows = hvd.reducescatter(gradient, op=hvd.Sum, name="gradient")
    """
    leaves = flatten(tensor)
    call = make_call(
        "reducescatter", leaves, name, op, process_set, prescale_factor, postscale_factor
    )
    return run_compressed(_scatter, call, leaves, compression)


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter, and return at once.

    It cannot be called inside `jax.jit`: XLA starts the calls of a compiled program itself.

    Args:
        tensor: Array, or tree of arrays, of at least one dimension, with the same shapes and types
            on all ranks.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        op: `Average` (the default) or `Sum`.
        process_set: Ranks that take part. By default all ranks do.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.

    Returns:
        A handle for `poll` and `synchronize`. `synchronize` returns what `reducescatter` returns,
        and raises what it raises.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
    """
    leaves = flatten(tensor)
    call = make_call(
        "reducescatter", leaves, name, op, process_set, prescale_factor, postscale_factor
    )
    return dispatch.start(call, leaves.arrays, leaves.rebuild)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several arrays as one operation. Differentiable.

    Args:
        tensors: List of arrays or trees. They travel as one operation.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        compression: Compressor for what travels between the ranks, such as `Compression.fp16`. By
            default nothing is compressed.
        op: `Average` (the default) or `Sum`.
        process_set: Ranks that take part. By default all ranks do.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.

    Returns:
        A list with this rank's rows of each array, in the order of `tensors`.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: The ranks passed different arguments under this name, or a rank was
            lost. Inside `jax.jit` it is a `jax.errors.JaxRuntimeError` with the same text.
    """
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
    """Start reducing and scattering several arrays, and return at once.

    It cannot be called inside `jax.jit`: XLA starts the calls of a compiled program itself.

    Args:
        tensors: List of arrays or trees. They travel as one operation.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        op: `Average` (the default) or `Sum`.
        process_set: Ranks that take part. By default all ranks do.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.

    Returns:
        One handle for `poll` and `synchronize`, which returns the list of this rank's rows.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
    """
    group = check_group(tensors)
    return reducescatter_async(group, name, op, process_set, prescale_factor, postscale_factor)


def _share(array: Any, rank: int, size: int) -> tuple[int, ...]:
    """Return the shape of a rank's share of an array."""
    if array.ndim == 0:
        raise ValueError("reducescatter needs at least one dimension, got a scalar")
    each, extra = divmod(array.shape[0], size)
    return each + (rank < extra), *array.shape[1:]


def _send_back_gathered(back: Call, gradients: list[Any], rows: list[int]) -> list[Any]:
    """Gather the gradients; by upstream's convention, multiply those of a Sum by the set's size."""
    factor = back.reduction.prescale_factor * back.reduction.postscale_factor
    if back.reduction.op is Sum:
        factor *= runtime.group(back.set_id).size
    gather = dataclasses.replace(back, kind="allgather", reduction=Reduction())
    left = iter(rows)
    gathered = dispatch.run_sized(
        gather, gradients, lambda array, *_: (next(left), *array.shape[1:]), exact=False
    )
    return [each * factor for each in gathered]


_scatter = differentiable(partial(dispatch.run_sized, shape=_share), _send_back_gathered)
