"""allgather in all its forms.

Exported to users by `horovod.torch.mpi_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average
from horovod.engine.arguments import check_group, movement_input, set_id
from horovod.engine.collective import Collective, Kind
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.torch.ops import handles, operators
from horovod.torch.ops.autograd import backward_name, is_differentiable, needs_gradient
from horovod.torch.ops.grouped_allreduce import grouped_allreduce
from horovod.torch.ops.untraced import breaks_graph

Tensor = torch.Tensor


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension. Differentiable.

    Args:
        tensor: Tensor of at least one dimension; only the size of the first may differ between
            ranks.
        name: Ranks match operations by name, or by the order of their calls if it is left out.
        process_set: The ranks that take part.

    Returns:
        The rows of all ranks, in the order of ranks.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: Ranks passed different things under this name, or a rank is lost.

    Examples:
        >>> predictions = hvd.allgather(own_predictions, name="predictions")
    """
    gathered: Tensor
    if needs_gradient(tensor):
        gathered = HorovodAllgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]
    else:
        gathered = _gather(tensor, name, process_set)
    return gathered


@breaks_graph("use hvd.allgather")
def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an allgather of `tensor`; return a handle for `poll` and `synchronize`.

    `name` and `process_set` are those of `allgather`.
    """
    return handles.hand_out(start_allgather([tensor], name, process_set), handles.first)


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Gather several tensors as one operation. Differentiable.

    Args:
        tensors: Tensors such as `allgather` takes, all on one device.
        name: Ranks match operations by name, or by the order of their calls if it is left out.
        process_set: The ranks that take part.

    Returns:
        The gathered tensors, in the order of `tensors`.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: Ranks passed different things under this name, or a rank is lost.
    """
    tensors = check_group(tensors)
    if is_compiling():
        results = []
        for index, tensor in enumerate(tensors):
            own_name = None if name is None else f"{name}.{index}"
            results.append(allgather(tensor, own_name, process_set))
        return tuple(results)
    gathered: Sequence[Tensor]
    if needs_gradient(*tensors):
        gathered = HorovodGroupedAllgather.apply(name, process_set, *tensors)  # type: ignore[no-untyped-call]
    else:
        gathered = start_allgather(tensors, name, process_set, False).wait()
    return tuple(gathered)


@breaks_graph("use hvd.grouped_allgather")
def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start gathering `tensors` as one operation; return one handle.

    `name` and `process_set` are those of `grouped_allgather`.
    """
    request = start_allgather(check_group(tensors), name, process_set)
    return handles.hand_out(request, tuple)


class HorovodAllgather(torch.autograd.Function):
    """allgather; the gradient is averaged over the ranks, and each gets its own rows."""

    @staticmethod
    def forward(tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        return _gather(tensor, name, process_set)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensor, name, process_set = inputs
        ctx.rows = tensor.shape[0]
        ctx.arguments = backward_name(name), process_set

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        name, process_set = ctx.arguments
        if is_compiling():
            return operators.allgather_gradient(gradient, ctx.rows, name, process_set), None, None
        (mine,) = _own_parts([gradient], [ctx.rows], name, process_set)
        return mine, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Gather the rows of a batch, whose dimension is moved behind that of the rows."""
        tensor, name, process_set = inputs
        gathered: Tensor = HorovodAllgather.apply(  # type: ignore[no-untyped-call]
            tensor.movedim(in_dims[0], 1), name, process_set
        )
        return gathered, 1


class HorovodGroupedAllgather(torch.autograd.Function):
    """grouped_allgather; the gradients are averaged as one group."""

    @staticmethod
    def forward(name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(start_allgather(tensors, name, process_set, False).wait())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        name, process_set, *tensors = inputs
        ctx.differentiable = [is_differentiable(tensor) for tensor in tensors]
        ctx.rows = [tensor.shape[0] for tensor in tensors if is_differentiable(tensor)]
        ctx.arguments = backward_name(name), process_set

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(gradients, ctx.differentiable, strict=True)
        chosen = [gradient for gradient, is_chosen in pairs if is_chosen]
        mine = iter(_own_parts(chosen, ctx.rows, *ctx.arguments))
        return None, None, *(next(mine) if yes else None for yes in ctx.differentiable)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """Gather the rows of batches, whose dimensions are moved behind those of the rows."""
        name, process_set, *tensors = inputs
        moved = [t.movedim(dim, 1) for t, dim in zip(tensors, in_dims[2:], strict=True)]
        gathered = HorovodGroupedAllgather.apply(name, process_set, *moved)  # type: ignore[no-untyped-call]
        return gathered, (1,) * len(tensors)


def _gather(tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
    """Gather one tensor, and wait for it."""
    if is_compiling():
        return operators.allgather(tensor, name, process_set)
    gathered: Tensor = start_allgather([tensor], name, process_set, False).wait()[0]
    return gathered


def _own_parts(
    gradients: Sequence[Tensor], rows: list[int], name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    """Average gradients of what was gathered, and return this rank's rows of each."""
    averaged = grouped_allreduce(gradients, name=name, op=Average, process_set=process_set)
    parts = zip(averaged, _first_rows(rows, name, process_set), rows, strict=True)
    return [gradient.narrow(0, first, count) for gradient, first, count in parts]


def start_allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, background: bool = True
) -> Request:
    """Enqueue an allgather of a group; without `background` the caller waits at once."""
    sources = [movement_input(tensor) for tensor in tensors]
    collective = Collective(Kind.ALLGATHER, name, set_id(process_set))
    return runtime.submit(collective, sources, background=background)


def _first_rows(rows: list[int], name: str | None, process_set: ProcessSet) -> list[int]:
    """Return where this rank's rows begin in each gathered tensor."""
    name = None if name is None else f"{name}.rows"
    table = allgather(torch.tensor([rows]), name=name, process_set=process_set)
    rank = process_set.rank()
    return [int(first) for first in table[:rank].sum(dim=0)]
