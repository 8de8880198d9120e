"""Upstream's path of the collectives for MXNet.

Calls return when their result is complete. `priority` is accepted everywhere and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from horovod.engine.arguments import check_splits, movement_input, reduction_inputs, set_id
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from horovod.engine.shared_api import *
from horovod.engine.shared_api import _basics, init, shutdown
from horovod.mxnet.allreduce_ops import (
    Wait,
    allreduce,
    allreduce_,
    grouped_allreduce,
    grouped_allreduce_,
    to_results,
)
from horovod.mxnet.arrays import check_array, mxnet_errors, to_mxnet, to_torch


def allgather(
    tensor: Any,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the arrays of all ranks along the first dimension.

    Args:
        tensor: Dense NDArray. All dimensions but the first must be the same on all ranks.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A new array with the rows of all ranks, in the order of ranks.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
    """
    return grouped_allgather([tensor], name, priority, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several arrays as one operation.

    Args:
        tensors: List of dense NDArrays. They travel as one operation.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A list with the gathered arrays, in the order of `tensors`.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
    """
    if not tensors:
        return list(tensors)
    with mxnet_errors():
        sources = [movement_input(to_torch(each)) for each in tensors]
        collective = Collective(Kind.ALLGATHER, name, set_id(process_set))
        gathered = runtime.submit(collective, sources, background=False).wait()
        return to_results(gathered, tensors)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send one rank's array to all ranks, as a new array.

    Args:
        tensor: Dense NDArray, with the same shape and type on all ranks. The values of ranks other
            than the root are ignored.
        root_rank: Rank of the whole job, even within a process set, whose array is sent.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A new array with the root's values.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
    """
    with mxnet_errors():
        wait = start_broadcast(
            tensor, root_rank, name, process_set, in_place=False, background=False
        )
        return wait()


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite an array with the root's array.

    Args:
        tensor: Dense NDArray, with the same shape and type on all ranks. On ranks other than the
            root it is overwritten.
        root_rank: Rank of the whole job, even within a process set, whose array is sent.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        `tensor` itself.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
    """
    with mxnet_errors():
        wait = start_broadcast(tensor, root_rank, name, process_set, background=False)
        return wait()


def start_broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    in_place: bool = True,
    background: bool = True,
) -> Wait:
    """Start sending the root's array to every rank; return a function that waits for it."""
    source = movement_input(to_torch(tensor, in_place))
    output = source if in_place else torch.empty_like(source)
    collective = Collective(Kind.BROADCAST, name, set_id(process_set), root_rank=root_rank)
    request = runtime.submit(collective, [source], [output], background=background)

    def wait() -> Any:
        request.wait()
        return to_results([output], [tensor], in_place)[0]

    return wait


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows to each rank, and collect the rows that the ranks send here.

    Args:
        tensor: Dense NDArray. All dimensions but the first must be the same on all ranks.
        splits: How many rows go to each rank: a list of integers or an int32 NDArray, with one
            number for each rank of the set. By default all ranks get the same number of rows.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        The received rows, in the order of ranks. If `splits` is given, a pair: the rows, and an
        int32 array with the number of rows that came from each rank.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
    """
    with mxnet_errors():
        source = movement_input(to_torch(tensor))
        if hasattr(splits, "asnumpy"):
            splits = check_array(splits).asnumpy().reshape(-1)
        rows = None if splits is None else check_splits(splits)
        collective = Collective(Kind.ALLTOALL, name, set_id(process_set), splits=rows)
        request = runtime.submit(collective, [source], background=False)
        output, received = request.wait()
        rows_received = to_mxnet(output, tensor)
        if splits is None:
            return rows_received
        return rows_received, to_mxnet(torch.tensor(received, dtype=torch.int32), tensor)


def reducescatter(
    tensor: Any,
    op: ReduceOp = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce an array over all ranks and keep this rank's rows.

    The rows are divided as evenly as possible; if their number is not divisible, the first ranks
    get one row more.

    Args:
        tensor: Dense NDArray, with the same shape and type on all ranks.
        op: `Average` (the default) or `Sum`.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        process_set: Ranks that take part. By default all ranks do.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.

    Returns:
        A new array with this rank's rows of the result.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
        AssertionError: `op` is neither `Average` nor `Sum`.
    """
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], op, name, priority, process_set, *factors)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: ReduceOp = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several arrays as one operation.

    Args:
        tensors: List of dense NDArrays. They travel as one operation.
        op: `Average` (the default) or `Sum`.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        process_set: Ranks that take part. By default all ranks do.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.

    Returns:
        A list with this rank's rows of each array, in the order of `tensors`.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
        AssertionError: `op` is neither `Average` nor `Sum`.
    """
    if op not in (Average, Sum):
        raise AssertionError(f"reducescatter takes Average or Sum, not {op!r}")
    if not tensors:
        return list(tensors)
    reduction = Reduction(op, prescale_factor, postscale_factor)
    with mxnet_errors():
        sources = reduction_inputs([to_torch(each) for each in tensors], reduction)
        collective = Collective(Kind.REDUCESCATTER, name, set_id(process_set), reduction)
        request = runtime.submit(collective, sources, background=False)
        return to_results(request.wait(), tensors)
