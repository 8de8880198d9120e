"""The collectives as operators of torch, for code that torch.compile looks into.

The compiler cannot follow a collective into the engine. Here each is an operator that the compiler
puts into its graph as it is; what it does when the graph runs is in
`horovod.torch.ops.operator_kernels`. Used by the collectives' own modules (`allreduce`, ...) while
a graph is made. Code that is not compiled calls the engine directly.

A compiler removes operations whose results nobody uses, and changes the order of others. With
collectives that would leave the other ranks waiting, or give them the wrong data. So every operator
claims to change one tensor, `_order`: to the compiler each depends on the one before.

Results are written into tensors that the caller passes, because the compiler takes no lists of
results from operators that change something, nor results whose sizes are known only when the graph
runs. Where other ranks decide on the size, as with the rows of an allgather, it is asked for first,
by an operator that changes nothing (`total_rows`).

PyTorch 2.4 cannot take operators that change lists of tensors into a graph. There compiled code
leaves its graph for a collective and goes on in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from packaging.version import Version

from horovod.common.process_sets import ProcessSet
from horovod.engine.arguments import unregistered
from horovod.engine.collective import Reduction
from horovod.engine.runtime import runtime
from horovod.torch.ops.operator_kernels import rows_name
from horovod.torch.ops.untraced import breaks_graph

Tensor = torch.Tensor
P = ParamSpec("P")
R = TypeVar("R")

ARE_TRACED = Version(torch.__version__).release >= (2, 5)

_order = torch.zeros(0)  # what all operators claim to change; see above


def _traced(function: Callable[P, R]) -> Callable[P, R]:
    """Let compiled code take the collective into its graph, or leave the graph for it."""
    return function if ARE_TRACED else breaks_graph("use PyTorch 2.5 or newer")(function)


@_traced
def allreduce(
    tensors: Sequence[Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
) -> list[Tensor]:
    """Reduce tensors as one operation into new ones."""
    outputs = [_like(tensor) for tensor in tensors]
    op, *factors, _ = reduction
    number = _number(process_set)
    torch.ops.horovod.allreduce(tensors, outputs, _order, name, int(op), *factors, number)
    return outputs


@_traced
def allreduce_(
    tensors: Sequence[Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
) -> None:
    """Reduce tensors as one operation in place."""
    op, *factors, _ = reduction
    torch.ops.horovod.allreduce_(tensors, _order, name, int(op), *factors, _number(process_set))


@_traced
def allgather(tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension."""
    number = _number(process_set)
    ranks = runtime.group(number).size
    rows = torch.ops.horovod.allgather_rows(tensor, _order, ranks, rows_name(name), number)
    gathered = tensor.new_empty((_total(rows), *tensor.shape[1:]))
    torch.ops.horovod.allgather(tensor, gathered, _order, name, number)
    return gathered


@_traced
def allgather_gradient(
    gradient: Tensor, rows: int, name: str | None, process_set: ProcessSet
) -> Tensor:
    """Average a gradient of what was gathered, and return this rank's `rows` of it."""
    mine = gradient.new_empty((rows, *gradient.shape[1:]))
    torch.ops.horovod.allgather_gradient(gradient, mine, _order, name, _number(process_set))
    return mine


@_traced
def broadcast(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    """Return the root's tensor as a new one."""
    output = _like(tensor)
    torch.ops.horovod.broadcast(tensor, output, _order, root_rank, name, _number(process_set))
    return output


@_traced
def broadcast_(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> None:
    """Overwrite a tensor with the root's."""
    torch.ops.horovod.broadcast_(tensor, _order, root_rank, name, _number(process_set))


@_traced
def alltoall(
    tensor: Tensor, splits: Tensor | None, name: str | None, process_set: ProcessSet
) -> tuple[Tensor, Tensor]:
    """Exchange rows; return those received, and how many came from each rank."""
    number = _number(process_set)
    ranks = runtime.group(number).size
    rows = torch.ops.horovod.alltoall_rows(tensor, splits, _order, ranks, rows_name(name), number)
    received = tensor.new_empty((_total(rows), *tensor.shape[1:]))
    torch.ops.horovod.alltoall(tensor, splits, received, _order, name, number)
    return received, rows


@_traced
def alltoall_gradient(
    gradient: Tensor, received: Tensor, rows: int, name: str | None, process_set: ProcessSet
) -> Tensor:
    """Send the gradient of received rows back; return the gradient of the input's `rows`."""
    returned = gradient.new_empty((rows, *gradient.shape[1:]))
    number = _number(process_set)
    torch.ops.horovod.alltoall_gradient(gradient, received, returned, _order, name, number)
    return returned


@_traced
def reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
) -> list[Tensor]:
    """Reduce tensors as one operation, and return this rank's rows of each."""
    number = _number(process_set)
    group = runtime.group(number)
    outputs = []
    for tensor in tensors:
        rows = tensor.shape[0] // group.size
        if group.rank < tensor.shape[0] % group.size:  # the first ranks get what is left over
            rows += 1
        outputs.append(tensor.new_empty((rows, *tensor.shape[1:])))
    op, *factors, _ = reduction
    torch.ops.horovod.reducescatter(tensors, outputs, _order, name, int(op), *factors, number)
    return outputs


@_traced
def barrier(process_set: ProcessSet) -> None:
    """Wait until every rank of the set has called this."""
    torch.ops.horovod.barrier(_order, _number(process_set))


def _number(process_set: ProcessSet) -> int:
    """Return the id of a set, which the graph has in place of the object."""
    number = process_set.process_set_id
    if number is None:
        raise unregistered(process_set)
    return number


def _total(rows: Tensor) -> int:
    """Return the sum of the ranks' rows, which is known when the graph runs."""
    total: int = torch.ops.horovod.total_rows(rows)
    return total


def _like(tensor: Tensor) -> Tensor:
    """Return a new, contiguous tensor, for what the engine makes of this one."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
