"""Exchange rows of arrays and whole trees (alltoall); `horovod.jax` exports the functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.arguments import check_splits
from horovod.engine.runtime import runtime
from horovod.jax.arrays import is_tracer
from horovod.jax.call import Call
from horovod.jax.compiled import dispatch
from horovod.jax.derivatives import differentiable
from horovod.jax.trees import flatten


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows to each rank, and collect the rows that the ranks send here. Differentiable.

    Args:
        tensor: Array, or tree of arrays with the same number of rows, which travel as one
            operation. All dimensions but the first must be the same on all ranks.
        splits: How many rows go to each rank: one int32 number for each rank of the set. By default
            all ranks get the same number of rows. It cannot be given inside `jax.jit`.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        The received rows, in the order of ranks. If `splits` is given, a pair: the rows, and an
        int32 array with the number of rows that came from each rank.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: The ranks passed different arguments under this name, or a rank was
            lost. Inside `jax.jit` it is a `jax.errors.JaxRuntimeError` with the same text.
    """
    leaves = flatten(tensor)
    call = _alltoall_call(splits, name, process_set, leaves.labels)
    if not leaves.arrays:
        raise ValueError("there is no array in the tree")
    *outputs, received = _exchange(call, leaves.arrays)
    output = leaves.rebuild(outputs)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an alltoall, and return at once.

    It cannot be called inside `jax.jit`: XLA starts the calls of a compiled program itself.

    Args:
        tensor: Array, or tree of arrays with the same number of rows.
        splits: How many rows go to each rank: one int32 number for each rank of the set. By default
            all ranks get the same number of rows. It cannot be given inside `jax.jit`.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A handle for `poll` and `synchronize`, which returns a pair: the received rows, and the
        number of rows that came from each rank.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
    """
    leaves = flatten(tensor)
    call = _alltoall_call(splits, name, process_set, leaves.labels)
    return dispatch.start(call, leaves.arrays, lambda made: (leaves.rebuild(made[:-1]), made[-1]))


def _alltoall_call(
    splits: Any, name: str | None, process_set: ProcessSet, labels: tuple[str, ...]
) -> Call:
    if is_tracer(splits):
        raise _splits_in_a_program()
    rows = () if splits is None else check_splits(splits)
    return Call.of("alltoall", process_set, name=name, splits=rows or None, labels=labels)


def _splits_in_a_program() -> ValueError:
    return ValueError(
        "alltoall inside of jit takes no splits: how many rows a rank receives must be known when "
        "the program is compiled"
    )


def _exchange_now(call: Call, arrays: list[Any]) -> list[Any]:
    """Return the received rows, and how many rows came from each rank."""
    if not dispatch.is_traced(arrays):
        return dispatch.run_now(call, arrays)
    if call.splits is not None:
        raise _splits_in_a_program()
    outputs = dispatch.run_sized(call, arrays, _same_rows)
    size = runtime.group(call.set_id).size
    return [*outputs, jnp.full(size, arrays[0].shape[0] // size, jnp.int32)]


def _same_rows(array: Any, _: int, size: int) -> tuple[int, ...]:
    if array.ndim == 0:
        raise ValueError("alltoall needs at least one dimension, got a scalar")
    if array.shape[0] % size:
        raise ValueError(
            f"alltoall without splits needs a first dimension divisible by {size}, got "
            f"{array.shape[0]}"
        )
    return array.shape


def _send_back_rows(back: Call, gradients: list[Any], rows: list[int], received: Any) -> list[Any]:
    """Send the gradients back to where the rows came from; unsent rows get zeros."""
    if back.splits is not None:
        back = dataclasses.replace(back, splits=tuple(received.tolist()))
    *outputs, _ = _exchange(back, gradients)
    return [
        jnp.concatenate([each, jnp.zeros((count - each.shape[0], *each.shape[1:]), each.dtype)])
        for each, count in zip(outputs, rows, strict=True)
    ]


_exchange = differentiable(_exchange_now, _send_back_rows)
