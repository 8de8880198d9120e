"""allreduce of one tensor, in all its forms; for groups see `horovod.torch.ops.grouped_allreduce`.

Exported to users by `horovod.torch.mpi_ops`. The blocking in-place form is the hot path: it does
nothing but check its arguments and wait for the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import check_writable, reduction_inputs, set_id, write_back
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.engine.submission import check_adasum
from horovod.torch.compression import Compression, Compressor, eight_bit_type
from horovod.torch.ops import handles, operators
from horovod.torch.ops.autograd import backward_name, needs_gradient
from horovod.torch.ops.operator_kernels import SMALL
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
        tensor: Tensor of the same shape and type on all ranks.
        average: Older form of `op`: True for `Average`, False for `Sum`.
        name: Ranks match operations by name, or by the order of their calls if it is left out.
        compression: Compressor of what is sent, such as `Compression.fp16`.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: Factor of the tensors before the reduction.
        postscale_factor: Factor of the result.
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
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    result: Tensor
    wire = eight_bit_type(compression, [tensor])
    if wire is not None:
        reduction = reduction._replace(wire=wire)
        (result,) = start([tensor], name, reduction, process_set, background=False).wait()
        return result
    compressed, context = compression.compress(tensor)
    reduced = _allreduce(compressed, name, reduction, process_set)
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
    """Start reducing `tensor` into a new one; return a handle for `poll` and `synchronize`.

    `average`, `name`, `op`, `prescale_factor`, `postscale_factor` and `process_set`
    are those of `allreduce`. `synchronize` raises what `allreduce` would.

    Examples:
        >>> handle = hvd.allreduce_async(tensor, name="loss")
        >>> result = hvd.synchronize(handle)
    """
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    request = start([tensor], name, reduction, process_set)
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
        reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
        operators.allreduce_([tensor], name, reduction, process_set)
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
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    request, finish = start_in_place([tensor], name, reduction, process_set, background=False)
    return finish(request.wait())[0]


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
    """Start reducing `tensor` in place; return a handle for `poll` and `synchronize`.

    `average`, `name`, `op`, `prescale_factor`, `postscale_factor` and `process_set`
    are those of `allreduce`. Leave the tensor alone until it is synchronised.
    """
    reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
    request, finish = start_in_place([tensor], name, reduction, process_set)
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
        reduction = Reduction(resolve_reduce_op(op, average), prescale_factor, postscale_factor)
        return reduce_into_new([tensor], name, reduction, process_set)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, average, name, op, *factors, process_set = inputs
        reduction = Reduction(resolve_reduce_op(op, average), *factors)
        ctx.arguments = backward_name(name), reduction, process_set

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _allreduce(gradient, *ctx.arguments), None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Reduce a batch as one tensor, which gives the same result."""
        reduced: Tensor = HorovodAllreduce.apply(*inputs)  # type: ignore[no-untyped-call]
        return reduced, in_dims[0]


# -- what all forms share, those of groups too ----------------------------------------------


def reduce_into_new(
    tensors: Sequence[Tensor], name: str | None, reduction: Reduction, process_set: ProcessSet
) -> Sequence[Tensor]:
    """Reduce tensors as one operation into new ones, and wait for them."""
    if is_compiling():
        return operators.allreduce(tensors, name, reduction, process_set)
    copy = _reduce_copy(tensors[0], name, reduction, process_set) if len(tensors) == 1 else None
    if copy is not None:
        return [copy]
    reduced: Sequence[Tensor] = start(tensors, name, reduction, process_set, False).wait()
    return reduced


def _reduce_copy(
    tensor: Tensor, name: str | None, reduction: Reduction, process_set: ProcessSet
) -> Tensor | None:
    """Reduce a copy of a tensor the shortest way, if one like it went before by this name.

    Large tensors in host memory are left alone: copying one costs more than a request.

    Returns:
        The copy, or None if nothing was done.
    """
    prepared = runtime.prepared.get(name)
    if prepared is None or reduction.prescale_factor != 1.0 or reduction.wire is not None:
        return None
    if (
        not isinstance(tensor, Tensor)
        or (tensor.is_cpu and tensor.nbytes > SMALL)
        or tensor.shape != prepared.shapes[0]
    ):
        return None
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    set_number = process_set.process_set_id
    done = prepared.reduce(copy, reduction.op, reduction.postscale_factor, set_number)
    return copy if done else None


def start(
    tensors: Sequence[Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    background: bool = True,
) -> Request:
    """Enqueue an allreduce into new tensors; without `background` the caller waits at once."""
    sources = reduction_inputs(tensors, reduction)
    collective = _collective(name, reduction, process_set)
    outputs = [torch.empty_like(source) for source in sources]
    return runtime.submit(collective, sources, outputs, background=background)


def start_in_place(
    tensors: Sequence[Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    background: bool = True,
) -> tuple[Request, Callable[[Any], tuple[Tensor, ...]]]:
    """Enqueue an allreduce in place; return it, and a function from its result to the tensors."""
    buffers = reduction_inputs(tensors, reduction)
    copies = [pair for pair in zip(tensors, buffers, strict=True) if pair[0] is not pair[1]]
    for tensor, _ in copies:
        check_writable(tensor)
    collective = _collective(name, reduction, process_set)
    request = runtime.submit(collective, buffers, buffers, background=background)

    def finish(_: Any) -> tuple[Tensor, ...]:
        for tensor, buffer in copies:
            write_back(tensor, buffer)
        return tuple(tensors)

    return request, finish


def _collective(name: str | None, reduction: Reduction, process_set: ProcessSet) -> Collective:
    """Return the record of an allreduce. Raise for Adasum in a process set, registered or not."""
    check_adasum(reduction, all_ranks=process_set is global_process_set)
    return Collective(Kind.ALLREDUCE, name, set_id(process_set), reduction)


def _allreduce(
    tensor: Tensor, name: str | None, reduction: Reduction, process_set: ProcessSet
) -> Tensor:
    """Reduce and wait; autograd takes part only where a gradient is asked for."""
    reduced: Tensor
    if needs_gradient(tensor):
        op, prescale_factor, postscale_factor, _ = reduction
        reduced = HorovodAllreduce.apply(  # type: ignore[no-untyped-call]
            tensor, None, name, op, prescale_factor, postscale_factor, process_set
        )
    else:
        (reduced,) = reduce_into_new([tensor], name, reduction, process_set)
    return reduced
