"""reducescatter of arrays and of whole trees, which `horovod.jax` exports to users."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.engine.collective import Reduction
from horovod.engine.runtime import runtime
from horovod.jax.call import Call
from horovod.jax.compiled import dispatch
from horovod.jax.compression import Compression, Compressor
from horovod.jax.derivatives import backward, for_floats, make_row_markers, row_counts
from horovod.jax.reductions import check_group, make_call
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
    pairs = [compression.compress(array) for array in leaves.arrays]
    scattered = _scatter(call, [array for array, _ in pairs]) if pairs else []
    return leaves.rebuild(
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _traced_scatter(call: Call, arrays: list[Any]) -> list[Any]:
    return dispatch.run_sized(call, arrays, _share)


def _scatter_forward(call: Call, arrays: list[Any]) -> tuple[list[Any], list[Any]]:
    return dispatch.run_sized(call, arrays, _share), make_row_markers(arrays)


def _scatter_backward(call: Call, row_markers: list[Any], gradients: list[Any]) -> tuple[list[Any]]:
    """Gather the gradients; by upstream's convention, multiply those of a Sum by the set's size."""
    factor = call.reduction.prescale_factor * call.reduction.postscale_factor
    if call.reduction.op is Sum:
        factor *= runtime.group(call.set_id).size
    gather = dataclasses.replace(backward(call), kind="allgather", reduction=Reduction())
    rows = iter(row_counts(row_markers, gradients))

    def gather_all(arrays: list[Any]) -> list[Any]:
        gathered = dispatch.run_sized(
            gather, arrays, lambda array, *_: (next(rows), *array.shape[1:]), exact=False
        )
        return [each * factor for each in gathered]

    return (for_floats(gather_all, gradients),)


_traced_scatter.defvjp(_scatter_forward, _scatter_backward)


def _scatter(call: Call, arrays: list[Any]) -> list[Any]:
    """Reduce and scatter arrays, at once or as part of a program."""
    if not dispatch.is_traced(arrays):
        return dispatch.run_now(call, arrays)
    return list(_traced_scatter(call, arrays))
