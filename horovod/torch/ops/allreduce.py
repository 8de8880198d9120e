"""allreduce of one tensor, in all its forms; of groups: `horovod.torch.ops.grouped_allreduce`.

Exported to users by `horovod.torch.mpi_ops`. The blocking in-place form is the hot path: it does
nothing but check its arguments and wait for the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Adasum, Average, ReduceOp
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import check_writable, reduction_input, set_id, write_back
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.torch.compression import Compression, Compressor, eight_bit_type
from horovod.torch.ops import handles, operators
from horovod.torch.ops.autograd import backward_name, needs_gradient
from horovod.torch.ops.untraced import breaks_graph

Tensor = torch.Tensor


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks into a new one. Differentiable.

    Args:
        tensor: Of the same shape and type on all ranks.
        average: Older form of `op`: True for `Average`, False for `Sum`.
        name: Ranks match operations by name; left out, by the order of their calls.
        compression: What travels in place of a tensor, such as `Compression.fp16`.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: Multiplies tensors before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        A tensor like `tensor`, with the same bits on all ranks.

    Raises:
        ValueError: This rank passed a wrong argument; nothing was sent.
        HorovodInternalError: Ranks passed different things under this name, or a rank is lost.

    Examples:
        >>> loss = hvd.allreduce(loss.detach(), name="loss")
        >>> total = hvd.allreduce(count, op=hvd.Sum, name="count")
    """
    op = resolve_reduce_op(op, average)
    result: Tensor
    wire = eight_bit_type(compression, [tensor])
    if wire is not None:
        factors = prescale_factor, postscale_factor
        request = start([tensor], name, op, *factors, process_set, background=False, wire=wire)
        (result,) = request.wait()
        return result
    compressed, context = compression.compress(tensor)
    reduced = _allreduce(compressed, name, op, prescale_factor, postscale_factor, process_set)
    result = compression.decompress(reduced, context)
    return result


@breaks_graph("use hvd.allreduce")
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing `tensor` into a new one; returns a handle for `poll` and `synchronize`.

    `average`, `name`, `op`, `prescale_factor`, `postscale_factor` and `process_set`
    are those of `allreduce`. `synchronize` raises what `allreduce` would.

    Examples:
        >>> handle = hvd.allreduce_async(tensor, name="loss")
        >>> result = hvd.synchronize(handle)
    """
    op = resolve_reduce_op(op, average)
    request = start([tensor], name, op, prescale_factor, postscale_factor, process_set)
    return handles.hand_out(request, handles.first)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce `tensor` over all ranks in place, and return it.

    `average`, `name`, `op`, `prescale_factor`, `postscale_factor` and `process_set`
    are those of `allreduce`, and so are the errors.
    """
    if is_compiling():
        op = resolve_reduce_op(op, average)
        factors = prescale_factor, postscale_factor
        operators.allreduce_([tensor], name, op, *factors, process_set)
        return tensor
    # A tensor like the last one of this name goes the shortest way.
    prepared = runtime.prepared.get(name)
    if (
        prepared is not None
        and average is None
        and prescale_factor == 1.0
        and isinstance(tensor, Tensor)
        and prepared.reduce(
            tensor, Average if op is None else op, postscale_factor, process_set.process_set_id
        )
    ):
        return tensor
    op = resolve_reduce_op(op, average)
    buffer = reduction_input(tensor, op, prescale_factor != 1.0 or postscale_factor != 1.0)
    if buffer is not tensor:
        check_writable(tensor)
    if op is Adasum:
        _check_adasum(process_set)
    buffers = [buffer]
    number = set_id(process_set)
    runtime.allreduce(
        buffers,
        buffers,
        name,
        op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set_id=number,
        background=False,
    ).wait()
    if buffer is not tensor:
        write_back(tensor, buffer)
    return tensor


@breaks_graph("use hvd.allreduce_")
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing `tensor` in place; returns a handle for `poll` and `synchronize`.

    `average`, `name`, `op`, `prescale_factor`, `postscale_factor` and `process_set`
    are those of `allreduce`. Leave the tensor alone until it is synchronised.
    """
    op = resolve_reduce_op(op, average)
    request, finish = start_in_place(
        [tensor], name, op, prescale_factor, postscale_factor, process_set
    )
    return handles.hand_out(request, lambda result: finish(result)[0])


# -- autograd -------------------------------------------------------------------------------


class HorovodAllreduce(torch.autograd.Function):
    """allreduce; its gradient is reduced with the same operator and factors."""

    @staticmethod
    def forward(
        tensor: Tensor,
        average: bool | None,
        name: str | None,
        op: ReduceOp | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> Tensor:
        op = resolve_reduce_op(op, average)
        factors = prescale_factor, postscale_factor
        return reduce_into_new([tensor], name, op, *factors, process_set)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, average, name, op, *others = inputs
        ctx.arguments = backward_name(name), resolve_reduce_op(op, average), *others

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _allreduce(gradient, *ctx.arguments), None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Reduce a batch as one tensor: it is all the same to a reduction."""
        reduced: Tensor = HorovodAllreduce.apply(*inputs)  # type: ignore[no-untyped-call]
        return reduced, in_dims[0]


# -- what all forms share, those of groups too ----------------------------------------------


def reduce_into_new(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Sequence[Tensor]:
    """Reduce tensors as one operation into new ones, and wait for them."""
    arguments = name, op, prescale_factor, postscale_factor, process_set
    if is_compiling():
        return operators.allreduce(tensors, *arguments)
    reduced: Sequence[Tensor] = start(tensors, *arguments, background=False).wait()
    return reduced


def start(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    background: bool = True,
    wire: torch.dtype | None = None,
) -> Request:
    """Enqueue an allreduce into new tensors; without `background` the caller waits at once."""
    scaled = prescale_factor != 1.0 or postscale_factor != 1.0
    sources = [reduction_input(tensor, op, scaled) for tensor in tensors]
    if op is Adasum:
        _check_adasum(process_set)
    process_set_id = set_id(process_set)
    outputs = [torch.empty_like(source) for source in sources]
    return runtime.allreduce(
        sources,
        outputs,
        name,
        op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set_id=process_set_id,
        background=background,
        wire=wire,
    )


def start_in_place(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    background: bool = True,
) -> tuple[Request, Callable[[Any], tuple[Tensor, ...]]]:
    """Enqueue an allreduce in place; also what turns its result into the caller's tensors."""
    scaled = prescale_factor != 1.0 or postscale_factor != 1.0
    buffers = [reduction_input(tensor, op, scaled) for tensor in tensors]
    copies = [pair for pair in zip(tensors, buffers, strict=True) if pair[0] is not pair[1]]
    for tensor, _ in copies:
        check_writable(tensor)
    if op is Adasum:
        _check_adasum(process_set)
    request = runtime.allreduce(
        buffers,
        buffers,
        name,
        op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set_id=set_id(process_set),
        background=background,
    )

    def finish(_: Any) -> tuple[Tensor, ...]:
        for tensor, buffer in copies:
            write_back(tensor, buffer)
        return tuple(tensors)

    return request, finish


def _allreduce(
    tensor: Tensor,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Tensor:
    """Blocking and differentiable; autograd takes part only where a gradient is asked for."""
    reduced: Tensor
    if needs_gradient(tensor):
        reduced = HorovodAllreduce.apply(  # type: ignore[no-untyped-call]
            tensor, None, name, op, prescale_factor, postscale_factor, process_set
        )
    else:
        arguments = name, op, prescale_factor, postscale_factor, process_set
        (reduced,) = reduce_into_new([tensor], *arguments)
    return reduced


def _check_adasum(process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum works on the global process set only")
