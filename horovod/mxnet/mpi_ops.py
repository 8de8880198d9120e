"""Upstream's home of the collectives for MXNet, and the basics of this binding.

Calls return when their result is there. `priority` orders the operations that are started together,
by optimizers and trainers: of those, the highest comes first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import movement_input, reduction_input, set_id
from horovod.engine.runtime import runtime
from horovod.engine.shared_api import *
from horovod.engine.shared_api import _basics, init, shutdown
from horovod.mxnet.arrays import check_array, mxnet_errors, to_mxnet, to_torch, write_back

Started = Callable[[], Any]  # waits for an operation, and returns its arrays


def _results(
    outputs: Sequence[torch.Tensor], tensors: Sequence[Any], in_place: bool = False
) -> list[Any]:
    """The outputs in the arrays that were given, or as new ones like them."""
    if not in_place:
        return [to_mxnet(*pair) for pair in zip(outputs, tensors, strict=True)]
    for array, output in zip(tensors, outputs, strict=True):
        write_back(array, output)
    return list(tensors)


# -- allreduce -------------------------------------------------------------------------------


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
    """Reduce an array over all ranks into a new one."""
    factors = prescale_factor, postscale_factor
    return _allreduce([tensor], average, name, factors, process_set, op, in_place=False)[0]


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
    """Reduce an array over all ranks in place."""
    factors = prescale_factor, postscale_factor
    return _allreduce([tensor], average, name, factors, process_set, op, in_place=True)[0]


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
    """Reduce several arrays as one operation into new ones; an empty list is returned as it is."""
    factors = prescale_factor, postscale_factor
    return _allreduce(tensors, average, name, factors, process_set, op, in_place=False)


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
    """Reduce several arrays as one operation in place; an empty list is returned as it is."""
    factors = prescale_factor, postscale_factor
    return _allreduce(tensors, average, name, factors, process_set, op, in_place=True)


def _allreduce(
    tensors: Sequence[Any],
    average: bool | None,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    op: ReduceOp | None,
    in_place: bool,
) -> Any:
    if not tensors:
        return tensors
    op = resolve_reduce_op(op, average)
    with mxnet_errors():
        wait = start_allreduce(tensors, name, op, factors, process_set, in_place, background=False)
        return wait()


def start_allreduce(
    tensors: Sequence[Any],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    in_place: bool = True,
    background: bool = True,
) -> Started:
    """Start reducing arrays as one operation."""
    if op is Adasum:
        raise AssertionError("Adasum is not supported by the MXNet binding")
    sources = [_reducible(to_torch(each, in_place), op, factors) for each in tensors]
    outputs = sources if in_place else [torch.empty_like(source) for source in sources]
    request = runtime.allreduce(
        sources,
        outputs,
        name,
        op,
        prescale=factors[0],
        postscale=factors[1],
        process_set_id=set_id(process_set),
        background=background,
    )

    def wait() -> list[Any]:
        request.wait()
        return _results(outputs, tensors, in_place)

    return wait


def _reducible(tensor: torch.Tensor, op: ReduceOp, factors: tuple[float, float]) -> torch.Tensor:
    return reduction_input(tensor, op, factors != (1.0, 1.0))


# -- the others --------------------------------------------------------------------------------


def allgather(
    tensor: Any,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the ranks' arrays along the first dimension, which may differ."""
    return grouped_allgather([tensor], name, priority, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several arrays as one operation."""
    if not tensors:
        return list(tensors)
    with mxnet_errors():
        sources = [movement_input(to_torch(each)) for each in tensors]
        gathered = runtime.allgather(
            sources, name, process_set_id=set_id(process_set), background=False
        ).wait()
        return _results(gathered, tensors)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's array as a new one on every rank."""
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
    """Overwrite an array with the root's."""
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
) -> Started:
    """Start sending the root's array to every rank."""
    source = movement_input(to_torch(tensor, in_place))
    output = source if in_place else torch.empty_like(source)
    request = runtime.broadcast(
        source, output, root_rank, name, process_set_id=set_id(process_set), background=background
    )

    def wait() -> Any:
        request.wait()
        return _results([output], [tensor], in_place)[0]

    return wait


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to rank i, and concatenate what the ranks sent us.

    Without `splits` every rank gets an equal part; with them, the result comes with the numbers of
    rows received from each rank.
    """
    with mxnet_errors():
        source = movement_input(to_torch(tensor))
        rows = None if splits is None else _check_splits(splits) or None
        request = runtime.alltoall(
            source, rows, name, process_set_id=set_id(process_set), background=False
        )
        output, received = request.wait()
        made = to_mxnet(output, tensor)
        if splits is None:
            return made
        return made, to_mxnet(torch.tensor(received, dtype=torch.int32), tensor)


def _check_splits(splits: Any) -> list[int]:
    if hasattr(splits, "asnumpy"):
        check_array(splits)
        if splits.dtype.__name__ != "int32":
            raise ValueError(f"splits must be of type int32, not {splits.dtype.__name__}")
        splits = splits.asnumpy().reshape(-1)
    try:
        return [operator.index(rows) for rows in splits]
    except TypeError:
        raise ValueError(f"splits must be integers, one for each rank, not {splits!r}") from None


def reducescatter(
    tensor: Any,
    op: ReduceOp = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce an array over all ranks and keep this rank's rows."""
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
    """Reduce and scatter several arrays as one operation."""
    if op not in (Average, Sum):
        raise AssertionError(f"reducescatter takes Average or Sum, not {op!r}")
    if not tensors:
        return list(tensors)
    factors = prescale_factor, postscale_factor
    with mxnet_errors():
        sources = [_reducible(to_torch(each), op, factors) for each in tensors]
        request = runtime.reducescatter(
            sources,
            name,
            op,
            prescale=factors[0],
            postscale=factors[1],
            process_set_id=set_id(process_set),
            background=False,
        )
        return _results(request.wait(), tensors)
