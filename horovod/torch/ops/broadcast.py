"""broadcast in all its forms.

Exported to users by `horovod.torch.mpi_ops`. `root_rank` is always a rank of the whole job, also
within a process set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average
from horovod.engine.arguments import check_writable, movement_input, set_id, write_back
from horovod.engine.collective import Collective, Kind
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.torch.ops import handles, operators
from horovod.torch.ops.allreduce import allreduce
from horovod.torch.ops.autograd import backward_name, needs_gradient
from horovod.torch.ops.untraced import breaks_graph

Tensor = torch.Tensor


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the root's tensor as a new one on every rank. Differentiable.

    Args:
        tensor: Tensor of the same shape and type on all ranks; only the root's content counts.
        root_rank: The rank whose tensor is sent, counted among all ranks of the job.
        name: Ranks match operations by name, or by the order of their calls if it is left out.
        process_set: The ranks that take part.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: Ranks passed different things under this name, or a rank is lost.

    Examples:
        >>> seed = hvd.broadcast(torch.tensor([seed]), root_rank=0, name="seed")
    """
    if not needs_gradient(tensor):
        return _broadcast(tensor, root_rank, name, process_set)
    output: Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return output


@breaks_graph("use hvd.broadcast")
def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a broadcast of `tensor` into a new one; return a handle for `poll` and `synchronize`.

    `root_rank`, `name` and `process_set` are those of `broadcast`.
    """
    source = movement_input(tensor)
    output = torch.empty_like(source)
    request = _start(source, output, root_rank, name, process_set)
    return handles.hand_out(request, lambda _: output)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite `tensor` with the root's tensor, and return it.

    `root_rank`, `name` and `process_set` are those of `broadcast`, and so are the errors.
    """
    if is_compiling():
        operators.broadcast_(tensor, root_rank, name, process_set)
        return tensor
    request, finish = _start_in_place(tensor, root_rank, name, process_set, background=False)
    return finish(request.wait())


@breaks_graph("use hvd.broadcast_")
def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start overwriting `tensor` with the root's; return a handle for `poll` and `synchronize`.

    `root_rank`, `name` and `process_set` are those of `broadcast`.
    """
    return handles.hand_out(*_start_in_place(tensor, root_rank, name, process_set))


class HorovodBroadcast(torch.autograd.Function):
    """broadcast; the root's gradient is the average of all, everybody else's is zero."""

    @staticmethod
    def forward(
        tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        return _broadcast(tensor, root_rank, name, process_set)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, root_rank, name, process_set = inputs
        ctx.arguments = root_rank, backward_name(name), process_set

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        root_rank, name, process_set = ctx.arguments
        averaged = allreduce(gradient, name=name, op=Average, process_set=process_set)
        if runtime.topology.rank != root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Send a batch as one tensor."""
        sent: Tensor = HorovodBroadcast.apply(*inputs)  # type: ignore[no-untyped-call]
        return sent, in_dims[0]


def _broadcast(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    if is_compiling():
        return operators.broadcast(tensor, root_rank, name, process_set)
    source = movement_input(tensor)
    output = torch.empty_like(source)
    _start(source, output, root_rank, name, process_set, background=False).wait()
    return output


def _start(
    source: Tensor,
    output: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    background: bool = True,
) -> Request:
    """Enqueue a broadcast; without `background` the caller waits at once."""
    collective = Collective(Kind.BROADCAST, name, set_id(process_set), root_rank=root_rank)
    return runtime.submit(collective, [source], [output], background=background)


def _start_in_place(
    tensor: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    background: bool = True,
) -> tuple[Request, Callable[[Any], Tensor]]:
    """Enqueue a broadcast in place; return it, and a function from its result to the tensor."""
    buffer = movement_input(tensor)
    if buffer is not tensor:
        check_writable(tensor)
    request = _start(buffer, buffer, root_rank, name, process_set, background)

    def finish(_: Any) -> Tensor:
        if buffer is not tensor:
            write_back(tensor, buffer)
        return tensor

    return request, finish
