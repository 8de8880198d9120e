"""reducescatter in all its forms.

Exported to users by `horovod.torch.mpi_ops`. Rows are dealt out as evenly as possible, the first
ranks getting one more where they do not divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import check_group, reduction_inputs, set_id, set_size
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.engine.submission import check_scattered
from horovod.torch.compression import Compression, Compressor
from horovod.torch.ops import handles, operators
from horovod.torch.ops.allgather import allgather, grouped_allgather
from horovod.torch.ops.autograd import backward_name, is_differentiable, needs_gradient
from horovod.torch.ops.untraced import breaks_graph

Tensor = torch.Tensor


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks and keep this rank's rows. Differentiable.

    Args:
        tensor: Tensor of at least one dimension, of the same shape and type on all ranks. Where the
            rows cannot be divided equally, the first ranks get one more.
        name: Ranks match operations by name, or by the order of their calls if it is left out.
        compression: Compressor of what is sent, such as `Compression.fp16`.
        op: `Average` or `Sum`.
        process_set: The ranks that take part.
        prescale_factor: Factor of the tensors before the reduction.
        postscale_factor: Factor of the result.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: Ranks passed different things under this name, or a rank is lost.

    Examples:
        >>> own_rows = hvd.reducescatter(gradient, op=hvd.Sum, name="gradient")
    """
    compressed, context = compression.compress(tensor)
    arguments = name, op, process_set, prescale_factor, postscale_factor
    if needs_gradient(compressed):
        reduced = HorovodReducescatter.apply(compressed, *arguments)  # type: ignore[no-untyped-call]
    else:
        (reduced,) = _scatter([compressed], *arguments)
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


@breaks_graph("use hvd.reducescatter")
def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of `tensor`; return a handle for `poll` and `synchronize`.

    `name`, `op`, `process_set`, `prescale_factor` and `postscale_factor` are those of
    `reducescatter`.
    """
    reduction = Reduction(resolve_reduce_op(op, None), prescale_factor, postscale_factor)
    request = _start([tensor], name, reduction, process_set)
    return handles.hand_out(request, handles.first)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors as one operation. Differentiable.

    Args:
        tensors: Tensors such as `reducescatter` takes, all on one device.
        name: Ranks match operations by name, or by the order of their calls if it is left out.
        compression: Compressor of what is sent, such as `Compression.fp16`.
        op: `Average` or `Sum`.
        process_set: The ranks that take part.
        prescale_factor: Factor of the tensors before the reduction.
        postscale_factor: Factor of the result.

    Returns:
        This rank's rows of each, in the order of `tensors`.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: Ranks passed different things under this name, or a rank is lost.
    """
    pairs = [compression.compress(tensor) for tensor in check_group(tensors)]
    compressed = [tensor for tensor, _ in pairs]
    arguments = name, op, process_set, prescale_factor, postscale_factor
    if needs_gradient(*compressed):
        reduced = HorovodGroupedReducescatter.apply(*arguments, *compressed)  # type: ignore[no-untyped-call]
    else:
        reduced = _scatter(compressed, *arguments)
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


@breaks_graph("use hvd.grouped_reducescatter")
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing and scattering `tensors` as one operation; return one handle.

    `name`, `op`, `process_set`, `prescale_factor` and `postscale_factor` are those of
    `grouped_reducescatter`.
    """
    reduction = Reduction(resolve_reduce_op(op, None), prescale_factor, postscale_factor)
    request = _start(check_group(tensors), name, reduction, process_set)
    return handles.hand_out(request, tuple)


class HorovodReducescatter(torch.autograd.Function):
    """reducescatter; the gradient is gathered and scaled as `_gradient_factor` says."""

    @staticmethod
    def forward(tensor: Tensor, *arguments: Any) -> Tensor:
        return _scatter([tensor], *arguments)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, name, *arguments = inputs
        ctx.arguments = backward_name(name), arguments

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        name, arguments = ctx.arguments
        gathered = allgather(gradient, name=name, process_set=arguments[1])
        return gathered * _gradient_factor(*arguments), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], tensor: Tensor, *arguments: Any) -> Any:
        """Scatter the rows of a batch, whose dimension is moved behind that of the rows."""
        moved = tensor.movedim(in_dims[0], 1)
        return HorovodReducescatter.apply(moved, *arguments), 1  # type: ignore[no-untyped-call]


class HorovodGroupedReducescatter(torch.autograd.Function):
    """grouped_reducescatter; the gradients are gathered as one group."""

    @staticmethod
    def forward(
        name: str | None,
        op: ReduceOp,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        arguments = op, process_set, prescale_factor, postscale_factor
        return tuple(_scatter(tensors, name, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        name, op, process_set, prescale_factor, postscale_factor, *tensors = inputs
        ctx.differentiable = [is_differentiable(tensor) for tensor in tensors]
        arguments = op, process_set, prescale_factor, postscale_factor
        ctx.arguments = backward_name(name), arguments

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        name, arguments = ctx.arguments
        factor = _gradient_factor(*arguments)
        pairs = zip(gradients, ctx.differentiable, strict=True)
        chosen = [gradient for gradient, is_chosen in pairs if is_chosen]
        gathered = iter(grouped_allgather(chosen, name=name, process_set=arguments[1]))
        scaled = (next(gathered) * factor if yes else None for yes in ctx.differentiable)
        return None, None, None, None, None, *scaled

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """Scatter the rows of batches, whose dimensions are moved behind those of the rows."""
        arguments, tensors = inputs[:5], inputs[5:]
        moved = [t.movedim(dim, 1) for t, dim in zip(tensors, in_dims[5:], strict=True)]
        scattered = HorovodGroupedReducescatter.apply(*arguments, *moved)  # type: ignore[no-untyped-call]
        return scattered, (1,) * len(tensors)


def _scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> Sequence[Tensor]:
    """Reduce tensors as one operation, and wait for this rank's rows of each."""
    reduction = Reduction(resolve_reduce_op(op, None), prescale_factor, postscale_factor)
    if is_compiling():
        return operators.reducescatter(tensors, name, reduction, process_set)
    reduced: Sequence[Tensor] = _start(tensors, name, reduction, process_set, False).wait()
    return reduced


def _gradient_factor(
    op: ReduceOp, process_set: ProcessSet, prescale_factor: float, postscale_factor: float
) -> float:
    """Return the gradient's factor; as upstream has it, a Sum counts once for every rank."""
    factor = prescale_factor * postscale_factor
    return factor * set_size(process_set) if op == Sum else factor


def _start(
    tensors: Sequence[Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    background: bool = True,
) -> Request:
    """Enqueue a reducescatter of a group; without `background` the caller waits at once."""
    check_scattered(reduction.op)  # first, as the tensors may not even know the operator
    sources = reduction_inputs(tensors, reduction)
    collective = Collective(Kind.REDUCESCATTER, name, set_id(process_set), reduction)
    return runtime.submit(collective, sources, background=background)
