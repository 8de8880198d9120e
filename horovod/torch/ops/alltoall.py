"""alltoall in all its forms.

Exported to users by `horovod.torch.mpi_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.arguments import check_splits, movement_input, set_id
from horovod.engine.collective import Collective, Kind
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.torch.ops import handles, operators
from horovod.torch.ops.autograd import backward_name, needs_gradient
from horovod.torch.ops.untraced import breaks_graph

Tensor = torch.Tensor
Splits = Tensor | Sequence[int] | None


def alltoall(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send `splits[i]` rows of the tensor to rank i, and concatenate what the ranks sent us.

    Differentiable.

    Args:
        tensor: Tensor of at least one dimension; only the size of the first may differ between
            ranks.
        splits: Number of rows for each rank, as int32; None sends equally many to each.
        name: Ranks match operations by name, or by the order of their calls if it is left out.
        process_set: The ranks that take part.

    Returns:
        The rows received, in the order of ranks; with `splits` a pair of these and of the number of
        rows received from each rank.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: Ranks passed different things under this name, or a rank is lost.

    Examples:
        >>> rows, counts = hvd.alltoall(torch.arange(3), splits=[1, 2], name="rows")
    """
    if needs_gradient(tensor):
        output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    else:
        output, received = _exchange(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


@breaks_graph("use hvd.alltoall")
def alltoall_async(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an alltoall; `synchronize` gives the output and the received splits.

    `tensor`, `splits`, `name` and `process_set` are those of `alltoall`.
    """
    return handles.hand_out(*_start(tensor, splits, name, process_set))


class HorovodAlltoall(torch.autograd.Function):
    """alltoall; the gradients travel back the way the rows came."""

    @staticmethod
    def forward(
        tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        return _exchange(tensor, splits, name, process_set)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensor, _, name, process_set = inputs
        _, received = output
        ctx.rows = tensor.shape[0]
        ctx.save_for_backward(received)
        ctx.arguments = backward_name(name), process_set
        ctx.mark_non_differentiable(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        name, process_set = ctx.arguments
        (received,) = ctx.saved_tensors
        if is_compiling():
            arguments = ctx.rows, name, process_set
            return operators.alltoall_gradient(gradient, received, *arguments), None, None, None
        returned, _ = alltoall(gradient, received, name, process_set)
        unsent = ctx.rows - returned.shape[0]
        if unsent:
            returned = torch.cat([returned, returned.new_zeros(unsent, *returned.shape[1:])])
        return returned, None, None, None


def _exchange(
    tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet
) -> tuple[Tensor, Tensor]:
    """Exchange rows, and wait for them."""
    if is_compiling():
        if splits is None or isinstance(splits, Tensor):
            rows = splits
        else:
            rows = torch.tensor(splits, dtype=torch.int32)
        return operators.alltoall(tensor, rows, name, process_set)
    request, finish = _start(tensor, splits, name, process_set, False)
    return finish(request.wait())


def _start(
    tensor: Tensor,
    splits: Splits,
    name: str | None,
    process_set: ProcessSet,
    background: bool = True,
) -> tuple[Request, Callable[[Any], tuple[Tensor, Tensor]]]:
    """Enqueue an alltoall; return it, and a function that makes tensors of its result.

    Without `background` the caller waits at once.
    """
    source = movement_input(tensor)
    rows = None if splits is None else check_splits(splits)
    collective = Collective(Kind.ALLTOALL, name, set_id(process_set), splits=rows)
    request = runtime.submit(collective, [source], background=background)
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")

    def finish(result: tuple[Tensor, list[int]]) -> tuple[Tensor, Tensor]:
        output, received = result
        return output, torch.tensor(received, dtype=torch.int32, device=device)

    return request, finish
