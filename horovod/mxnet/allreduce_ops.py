"""Reduce MXNet's arrays, and groups of them, over all ranks; `mpi_ops` has the other collectives.

`horovod.mxnet` exports the functions to users. Optimizers and trainers call `start_allreduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Adasum, ReduceOp
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import reduction_inputs, set_id
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from horovod.mxnet.arrays import mxnet_errors, to_mxnet, to_torch, write_back

Wait = Callable[[], Any]  # waits for an operation that was started, and returns its arrays


def to_results(
    outputs: Sequence[torch.Tensor], tensors: Sequence[Any], in_place: bool = False
) -> list[Any]:
    """Return the outputs as new arrays like `tensors`, or in place in `tensors` themselves."""
    if not in_place:
        return [to_mxnet(*pair) for pair in zip(outputs, tensors, strict=True)]
    for array, output in zip(tensors, outputs, strict=True):
        write_back(array, output)
    return list(tensors)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Any:
    """Reduce an array over all ranks into a new one.

    Args:
        tensor: Dense NDArray, with the same shape and type on all ranks.
        average: Deprecated, to be given instead of `op`: True for `Average`, False for `Sum`.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.
        process_set: Ranks that take part. By default all ranks do.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`. None means `Average`.

    Returns:
        A new array like `tensor`, with the same bits on all ranks.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
        AssertionError: `op` is `Adasum`, which MXNet does not have.

    Examples:
        >>> loss = hvd.allreduce(loss, name="loss")
    """
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    return _allreduce([tensor], name, reduction, process_set, in_place=False)[0]


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Any:
    """Reduce an array over all ranks in place.

    Args:
        tensor: Dense NDArray, with the same shape and type on all ranks. It is overwritten.
        average: Deprecated, to be given instead of `op`: True for `Average`, False for `Sum`.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.
        process_set: Ranks that take part. By default all ranks do.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`. None means `Average`.

    Returns:
        `tensor` itself.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
        AssertionError: `op` is `Adasum`, which MXNet does not have.
    """
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    return _allreduce([tensor], name, reduction, process_set, in_place=True)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Any:
    """Reduce several arrays over all ranks as one operation, into new ones.

    Args:
        tensors: List of dense NDArrays, which travel as one operation; it may be empty.
        average: Deprecated, to be given instead of `op`: True for `Average`, False for `Sum`.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.
        process_set: Ranks that take part. By default all ranks do.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`. None means `Average`.

    Returns:
        A list with the reduced arrays, in the order of `tensors`.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
        AssertionError: `op` is `Adasum`, which MXNet does not have.
    """
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    return _allreduce(tensors, name, reduction, process_set, in_place=False)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Any:
    """Reduce several arrays over all ranks as one operation, in place.

    Args:
        tensors: List of dense NDArrays to overwrite, as one operation; it may be empty.
        average: Deprecated, to be given instead of `op`: True for `Average`, False for `Sum`.
        name: Ranks match operations by this name; without one, by the order of their calls.
        priority: Accepted for compatibility and ignored: calls run in their order.
        prescale_factor: Number that multiplies the arrays before the reduction. The default is 1.
        postscale_factor: Number that multiplies the result. The default is 1.
        process_set: Ranks that take part. By default all ranks do.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`. None means `Average`.

    Returns:
        A list with the arrays of `tensors`.

    Raises:
        MXNetError: A wrong argument (also a ValueError), or a failure (HorovodInternalError, too).
        AssertionError: `op` is `Adasum`, which MXNet does not have.
    """
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    return _allreduce(tensors, name, reduction, process_set, in_place=True)


def _allreduce(
    tensors: Sequence[Any],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    in_place: bool,
) -> Any:
    if not tensors:
        return tensors
    with mxnet_errors():
        return start_allreduce(tensors, name, reduction, process_set, in_place, background=False)()


def start_allreduce(
    tensors: Sequence[Any],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    in_place: bool = True,
    background: bool = True,
) -> Wait:
    """Start reducing arrays as one operation.

    Args:
        tensors: The arrays.
        name: The name by which ranks match the operation.
        reduction: The operation and its factors.
        process_set: The ranks that take part.
        in_place: Whether the results overwrite the arrays; True by default.
        background: False if the caller waits at once.

    Returns:
        A function that waits for the operation and returns the reduced arrays.
    """
    if reduction.op is Adasum:
        raise AssertionError("Adasum is not supported by the MXNet binding")
    sources = reduction_inputs([to_torch(each, in_place) for each in tensors], reduction)
    outputs = sources if in_place else [torch.empty_like(source) for source in sources]
    collective = Collective(Kind.ALLREDUCE, name, set_id(process_set), reduction)
    request = runtime.submit(collective, sources, outputs, background=background)

    def wait() -> list[Any]:
        request.wait()
        return to_results(outputs, tensors, in_place)

    return wait
