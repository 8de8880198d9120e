"""allreduce of several tensors as one operation, in all its forms.

Exported to users by `horovod.torch.mpi_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import ReduceOp
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import check_group
from horovod.engine.collective import Reduction
from horovod.torch.compression import Compression, Compressor, eight_bit_type
from horovod.torch.ops import handles, operators
from horovod.torch.ops.allreduce import reduce_into_new, start, start_in_place
from horovod.torch.ops.autograd import backward_name, is_differentiable, needs_gradient
from horovod.torch.ops.untraced import breaks_graph

Tensor = torch.Tensor


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation into new ones. Differentiable.

    None of them is reduced before all ranks have submitted all of them.

    Args:
        tensors: Tensors on one device; all ranks pass the same number, shapes and types.
        average: Older form of `op`: True for `Average`, False for `Sum`.
        name: Ranks match operations by name, or by the order of their calls if it is left out.
        compression: Compressor of what is sent, such as `Compression.fp16`.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: Factor of the tensors before the reduction.
        postscale_factor: Factor of the result.
        process_set: The ranks that take part.

    Returns:
        The results, in the order of `tensors`.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: Ranks passed different things under this name, or a rank is lost.

    Examples:
        >>> mean_loss, mean_accuracy = hvd.grouped_allreduce([loss, accuracy], name="metrics")
    """
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    tensors = check_group(tensors)
    wire = eight_bit_type(compression, tensors)
    if wire is not None:
        reduction = reduction._replace(wire=wire)
        return list(start(tensors, name, reduction, process_set, background=False).wait())
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    reduced = _grouped_allreduce(sent, name, reduction, process_set)
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, compressed, strict=True)
    ]


@breaks_graph("use hvd.grouped_allreduce")
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing `tensors` as one operation into new ones; return one handle.

    `average`, `name`, `op`, `prescale_factor`, `postscale_factor` and `process_set`
    are those of `grouped_allreduce`. `synchronize` gives a tuple of the results.
    """
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    request = start(check_group(tensors), name, reduction, process_set)
    return handles.hand_out(request, tuple)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Reduce `tensors` as one operation in place, and return them.

    `average`, `name`, `op`, `prescale_factor`, `postscale_factor` and `process_set`
    are those of `grouped_allreduce`, and so are the errors.
    """
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    tensors = check_group(tensors)
    if is_compiling():
        operators.allreduce_(tensors, name, reduction, process_set)
        return tuple(tensors)
    request, finish = start_in_place(tensors, name, reduction, process_set, background=False)
    return finish(request.wait())


@breaks_graph("use hvd.grouped_allreduce_")
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing `tensors` as one operation in place; return one handle.

    `average`, `name`, `op`, `prescale_factor`, `postscale_factor` and `process_set`
    are those of `grouped_allreduce`. Leave the tensors alone until they are synchronised.
    """
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    request, finish = start_in_place(check_group(tensors), name, reduction, process_set)
    return handles.hand_out(request, finish)


class HorovodGroupedAllreduce(torch.autograd.Function):
    """grouped_allreduce; the gradients are reduced as one group too."""

    @staticmethod
    def forward(
        average: bool | None,
        name: str | None,
        op: ReduceOp | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
        return tuple(reduce_into_new(tensors, name, reduction, process_set))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        average, name, op, prescale_factor, postscale_factor, process_set, *tensors = inputs
        reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
        ctx.arguments = backward_name(name), reduction, process_set
        ctx.differentiable = [is_differentiable(tensor) for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(gradients, ctx.differentiable, strict=True)
        chosen = [gradient for gradient, is_chosen in pairs if is_chosen]
        reduced = iter(_grouped_allreduce(chosen, *ctx.arguments))
        return (None,) * 6 + tuple(next(reduced) if yes else None for yes in ctx.differentiable)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """Reduce batches as tensors, which gives the same results."""
        return HorovodGroupedAllreduce.apply(*inputs), in_dims[6:]  # type: ignore[no-untyped-call]


def _grouped_allreduce(
    tensors: Sequence[Tensor], name: str | None, reduction: Reduction, process_set: ProcessSet
) -> Sequence[Tensor]:
    reduced: Sequence[Tensor]
    if needs_gradient(*tensors):
        op, prescale_factor, postscale_factor, _ = reduction
        reduced = HorovodGroupedAllreduce.apply(  # type: ignore[no-untyped-call]
            None, name, op, prescale_factor, postscale_factor, process_set, *tensors
        )
    else:
        reduced = reduce_into_new(tensors, name, reduction, process_set)
    return reduced
