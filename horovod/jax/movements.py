"""allgather, broadcast and alltoall in all their forms, of arrays and of whole trees.

Exported to users by `horovod.jax`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average
from horovod.engine.runtime import runtime
from horovod.jax import dispatch
from horovod.jax.arrays import is_tracer
from horovod.jax.call import Call
from horovod.jax.derivatives import backward, floats, for_floats, shapes_only
from horovod.jax.reductions import check_group
from horovod.jax.trees import flatten


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the ranks' arrays along the first dimension, leaf by leaf of a tree, as one
    operation. Differentiable.

    The first dimension may differ between ranks, except inside of jit.
    """
    leaves = flatten(tensor)
    call = Call.of("allgather", process_set, name=name, labels=leaves.labels)
    return leaves.rebuilt(_gathered(call, leaves.arrays))


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an allgather; returns a handle for `poll` and `synchronize`."""
    leaves = flatten(tensor)
    call = Call.of("allgather", process_set, name=name, labels=leaves.labels)
    return dispatch.start(call, leaves.arrays, leaves.rebuilt)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Any, ...]:
    """Gather several arrays as one operation. Differentiable."""
    return tuple(allgather(check_group(tensors), name, process_set))


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start gathering several arrays as one operation; returns one handle."""
    return allgather_async(check_group(tensors), name, process_set)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's array, or tree, on every rank, as one operation. Differentiable.

    `root_rank` is a rank of the whole job, also within a process set.
    """
    leaves = flatten(tensor)
    call = _broadcast_call(root_rank, name, process_set, leaves.labels)
    if not leaves.arrays:
        return tensor
    if dispatch.is_traced(leaves.arrays):
        return leaves.rebuilt(_traced_broadcast(call, leaves.arrays))
    return leaves.rebuilt(dispatch.run_now(call, leaves.arrays))


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a broadcast; returns a handle for `poll` and `synchronize`."""
    leaves = flatten(tensor)
    call = _broadcast_call(root_rank, name, process_set, leaves.labels)
    return dispatch.start(call, leaves.arrays, leaves.rebuilt)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to rank i, and concatenate what the ranks sent us. Differentiable.

    Without `splits` every rank gets an equal part and the result is an array; with them it comes
    with the numbers of rows received from each rank, and cannot be compiled. The leaves of a tree,
    which have the same number of rows, travel as one operation.
    """
    leaves = flatten(tensor)
    call = _alltoall_call(splits, name, process_set, leaves.labels)
    if not leaves.arrays:
        raise ValueError("there is no array in the tree")
    if dispatch.is_traced(leaves.arrays):
        *outputs, received = _traced_exchange(call, leaves.arrays)
    else:
        *outputs, received = dispatch.run_now(call, leaves.arrays)
    output = leaves.rebuilt(outputs)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an alltoall; `synchronize` gives the output and the received splits."""
    leaves = flatten(tensor)
    call = _alltoall_call(splits, name, process_set, leaves.labels)
    return dispatch.start(call, leaves.arrays, lambda made: (leaves.rebuilt(made[:-1]), made[-1]))


# -- allgather -------------------------------------------------------------------------------


def _gathered(call: Call, arrays: list[Any]) -> list[Any]:
    if not arrays:
        return []
    if not dispatch.is_traced(arrays):
        return dispatch.run_now(call, arrays)
    return list(_traced_gather(call, arrays))


def _all_rows(array: Any, _: int, size: int) -> tuple[int, ...]:
    if array.ndim == 0:
        raise ValueError("allgather needs at least one dimension, got a scalar")
    return size * array.shape[0], *array.shape[1:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _traced_gather(call: Call, arrays: list[Any]) -> list[Any]:
    return dispatch.run_sized(call, arrays, _all_rows)


def _gather_forward(call: Call, arrays: list[Any]) -> tuple[list[Any], list[Any]]:
    return dispatch.run_sized(call, arrays, _all_rows), shapes_only(arrays)


def _gather_backward(call: Call, like: list[Any], gradients: list[Any]) -> tuple[list[Any]]:
    """The gradient is averaged over the ranks, and each gets its own rows."""
    rows = [each.shape[0] for each, _ in floats(like, gradients)]
    average = dataclasses.replace(backward(call), kind="allreduce", op=int(Average))

    def own(arrays: list[Any]) -> list[Any]:
        averaged = dispatch.run(average, arrays)
        firsts = _first_rows(rows, average, dispatch.is_traced(arrays))
        return [
            each[first : first + count]
            for each, first, count in zip(averaged, firsts, rows, strict=True)
        ]

    return (for_floats(own, gradients),)


_traced_gather.defvjp(_gather_forward, _gather_backward)


def _first_rows(rows: list[int], call: Call, traced: bool) -> list[int]:
    """Where this rank's rows begin in each gathered array."""
    rank = runtime.group(call.set_id).rank
    if traced:  # all ranks have as many
        return [rank * count for count in rows]
    name = None if call.name is None else f"{call.name}.rows"
    gather = dataclasses.replace(call, kind="allgather", name=name)
    (table,) = dispatch.run_now(gather, [jnp.asarray([rows], jnp.int32)])
    return [int(first) for first in table[:rank].sum(axis=0)]


# -- broadcast -------------------------------------------------------------------------------


def _broadcast_call(
    root_rank: int, name: str | None, process_set: ProcessSet, labels: tuple[str, ...]
) -> Call:
    call = Call.of("broadcast", process_set, name=name, root_rank=int(root_rank), labels=labels)
    ranks = runtime.group(call.set_id).global_ranks
    if call.root_rank not in ranks:
        raise ValueError(
            f"root rank {root_rank} is not in the process set, whose ranks are {list(ranks)}"
        )
    return call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _traced_broadcast(call: Call, arrays: list[Any]) -> list[Any]:
    return dispatch.run(call, arrays)


def _broadcast_forward(call: Call, arrays: list[Any]) -> tuple[list[Any], None]:
    return dispatch.run(call, arrays), None


def _broadcast_backward(call: Call, _: None, gradients: list[Any]) -> tuple[list[Any]]:
    """The root's gradient is the average of all, everybody else's is zero."""
    average = dataclasses.replace(backward(call), kind="allreduce", op=int(Average))

    def averaged(arrays: list[Any]) -> list[Any]:
        made = dispatch.run(average, arrays)
        if runtime.topology.rank == call.root_rank:
            return made
        return [jnp.zeros_like(each) for each in made]

    return (for_floats(averaged, gradients),)


_traced_broadcast.defvjp(_broadcast_forward, _broadcast_backward)


# -- alltoall --------------------------------------------------------------------------------


def _alltoall_call(
    splits: Any, name: str | None, process_set: ProcessSet, labels: tuple[str, ...]
) -> Call:
    if is_tracer(splits):
        raise ValueError(
            "alltoall inside of jit takes no splits: how many rows a rank receives must be known "
            "when the program is compiled"
        )
    if splits is not None:
        if hasattr(splits, "dtype"):
            if splits.dtype != jnp.int32:
                raise ValueError(f"splits must be of type int32, not {splits.dtype}")
            if splits.ndim > 1:
                raise ValueError(f"splits must have one dimension, not {splits.ndim}")
            splits = splits.reshape(-1).tolist()
        try:
            splits = tuple(operator.index(rows) for rows in splits)
        except TypeError:
            raise ValueError(
                f"splits must be integers, one for each rank, not {splits!r}"
            ) from None
    return Call.of("alltoall", process_set, name=name, splits=splits or None, labels=labels)


def _exchange(call: Call, arrays: list[Any]) -> list[Any]:
    """Outputs, and the received splits."""
    if not dispatch.is_traced(arrays):
        return dispatch.run_now(call, arrays)
    if call.splits is not None:
        raise ValueError(
            "alltoall inside of jit takes no splits: how many rows a rank receives must be known "
            "when the program is compiled"
        )
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _traced_exchange(call: Call, arrays: list[Any]) -> list[Any]:
    return _exchange(call, arrays)


def _exchange_forward(call: Call, arrays: list[Any]) -> tuple[list[Any], Any]:
    made = _exchange(call, arrays)
    return made, (shapes_only(arrays), made[-1])


def _exchange_backward(call: Call, kept: Any, gradients: list[Any]) -> tuple[list[Any]]:
    """The gradients travel back the way the rows came."""
    like, received = kept
    back = backward(call)
    if call.splits is not None:
        back = dataclasses.replace(back, splits=tuple(received.tolist()))

    def returned(arrays: list[Any]) -> list[Any]:
        *made, _ = _exchange(back, arrays)
        rows = like[0].shape[0]
        return [
            jnp.concatenate([each, jnp.zeros((rows - each.shape[0], *each.shape[1:]), each.dtype)])
            for each in made
        ]

    return (for_floats(returned, gradients[:-1]),)


_traced_exchange.defvjp(_exchange_forward, _exchange_backward)
