"""Gather and broadcast arrays and whole trees; `horovod.jax` exports the functions to users."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average
from horovod.engine.collective import Reduction
from horovod.engine.runtime import runtime
from horovod.jax.call import Call
from horovod.jax.compiled import dispatch
from horovod.jax.derivatives import differentiable
from horovod.jax.reductions import check_group, reduce_differentiably
from horovod.jax.trees import flatten


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the arrays of all ranks along the first dimension. Differentiable.

    Args:
        tensor: Array, or tree of arrays, of at least one dimension. All dimensions but the first
            must be the same on all ranks; inside `jax.jit` the first must be, too.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        An array, or a tree of arrays, with the rows of all ranks in the order of ranks.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: The ranks passed different arguments under this name, or a rank was
            lost. Inside `jax.jit` it is a `jax.errors.JaxRuntimeError` with the same text.

    Examples:
        >>> everybody = hvd.allgather(predictions, name="predictions")
    """
    leaves = flatten(tensor)
    call = Call.of("allgather", process_set, name=name, labels=leaves.labels)
    return leaves.rebuild(_gather(call, leaves.arrays))


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an allgather, and return at once.

    It cannot be called inside `jax.jit`: XLA starts the calls of a compiled program itself.

    Args:
        tensor: Array, or tree of arrays, of at least one dimension. All dimensions but the first
            must be the same on all ranks; inside `jax.jit` the first must be, too.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A handle for `poll` and `synchronize`. `synchronize` returns what `allgather` returns, and
        raises what it raises.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
    """
    leaves = flatten(tensor)
    call = Call.of("allgather", process_set, name=name, labels=leaves.labels)
    return dispatch.start(call, leaves.arrays, leaves.rebuild)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Any, ...]:
    """Gather several arrays as one operation. Differentiable.

    Args:
        tensors: List of arrays or trees. They travel as one operation.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A tuple with the gathered arrays, in the order of `tensors`.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: The ranks passed different arguments under this name, or a rank was
            lost. Inside `jax.jit` it is a `jax.errors.JaxRuntimeError` with the same text.
    """
    return tuple(allgather(check_group(tensors), name, process_set))


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start gathering several arrays as one operation, and return at once.

    It cannot be called inside `jax.jit`: XLA starts the calls of a compiled program itself.

    Args:
        tensors: List of arrays or trees. They travel as one operation.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        One handle for `poll` and `synchronize`, which returns the gathered arrays.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
    """
    return allgather_async(check_group(tensors), name, process_set)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send one rank's array, or tree of arrays, to all ranks. Differentiable.

    Args:
        tensor: Array, or tree of arrays, with the same structure, shapes and types on all ranks.
            The leaves of a tree travel as one operation. The values of ranks other than the root
            are ignored.
        root_rank: Rank whose values are sent. It is a rank of the whole job, also within a process
            set.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A new array or tree with the root's values.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: The ranks passed different arguments under this name, or a rank was
            lost. Inside `jax.jit` it is a `jax.errors.JaxRuntimeError` with the same text.
    """
    leaves = flatten(tensor)
    call = _broadcast_call(root_rank, name, process_set, leaves.labels)
    return leaves.rebuild(_broadcast(call, leaves.arrays))


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a broadcast, and return at once.

    It cannot be called inside `jax.jit`: XLA starts the calls of a compiled program itself.

    Args:
        tensor: Array, or tree of arrays, with the same structure, shapes and types on all ranks.
            The leaves of a tree travel as one operation.
        root_rank: Rank whose values are sent. It is a rank of the whole job, also within a process
            set.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A handle for `poll` and `synchronize`. `synchronize` returns what `broadcast` returns, and
        raises what it raises.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
    """
    leaves = flatten(tensor)
    call = _broadcast_call(root_rank, name, process_set, leaves.labels)
    return dispatch.start(call, leaves.arrays, leaves.rebuild)


# -- allgather -------------------------------------------------------------------------------


def _all_rows(array: Any, _: int, size: int) -> tuple[int, ...]:
    if array.ndim == 0:
        raise ValueError("allgather needs at least one dimension, got a scalar")
    return size * array.shape[0], *array.shape[1:]


def _send_back_own_rows(back: Call, gradients: list[Any], rows: list[int]) -> list[Any]:
    """Average the gradients over the ranks, and return this rank's rows."""
    average = dataclasses.replace(back, kind="allreduce", reduction=Reduction(Average))
    averaged = reduce_differentiably(average, gradients)
    firsts = _first_rows(rows, average, dispatch.is_traced(gradients))
    return [
        each[first : first + count]
        for each, first, count in zip(averaged, firsts, rows, strict=True)
    ]


_gather = differentiable(partial(dispatch.run_sized, shape=_all_rows), _send_back_own_rows)


def _first_rows(rows: list[int], call: Call, traced: bool) -> list[int]:
    """Return where this rank's rows begin in each gathered array."""
    rank = runtime.group(call.set_id).rank
    if traced:  # in a program all ranks have the same number of rows
        return [rank * count for count in rows]
    name = None if call.name is None else f"{call.name}.rows"
    gather = dataclasses.replace(call, kind="allgather", name=name)
    (table,) = dispatch.run_now(gather, [jnp.asarray([rows], jnp.int32)])
    return [int(first) for first in table[:rank].sum(axis=0)]


# -- broadcast -------------------------------------------------------------------------------


def _broadcast_call(
    root_rank: int, name: str | None, process_set: ProcessSet, labels: tuple[str, ...]
) -> Call:
    """Make a broadcast; ValueError if the root is not in the process set."""
    call = Call.of("broadcast", process_set, name=name, root_rank=int(root_rank), labels=labels)
    ranks = runtime.group(call.set_id).global_ranks
    if call.root_rank not in ranks:
        raise ValueError(
            f"root rank {root_rank} is not in the process set, whose ranks are {list(ranks)}"
        )
    return call


def _send_back_to_root(back: Call, gradients: list[Any], _: list[int]) -> list[Any]:
    """Return the average of all ranks' gradients on the root, and zeros elsewhere."""
    average = dataclasses.replace(back, kind="allreduce", reduction=Reduction(Average))
    averages = reduce_differentiably(average, gradients)
    is_root = runtime.topology.rank == back.root_rank
    # Zeros that depend on the averages, so that gradients of gradients are the same calls on all.
    return [jnp.where(is_root, each, jnp.zeros_like(each)) for each in averages]


_broadcast = differentiable(dispatch.run, _send_back_to_root)
