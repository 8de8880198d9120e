"""Reduce and scatter tensors and groups of them; `horovod.tensorflow` exports the functions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.common.compression import run_compressed
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import reduction_inputs
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.bridge import as_tensor, device_scope, without_autograph
from horovod.tensorflow.ops.call import Call, check_group, reduce, spec_with_any_rows
from horovod.tensorflow.ops.errors import AbortedError, InvalidArgumentError
from horovod.tensorflow.ops.info_ops import set_size
from horovod.tensorflow.ops.movements import gather


@without_autograph
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor, a variable, an array or IndexedSlices over all ranks. Differentiable.

    IndexedSlices take Sum and Average; the result contains the slices of all ranks.

    Args:
        tensor: The tensor to reduce, with the same shape and type on all ranks.
        average: Older form of `op`: True for `Average`, False for `Sum`.
        device_dense: Accepted for compatibility.
        device_sparse: Accepted for compatibility.
        compression: How tensors are compressed, such as `Compression.fp16`; not at all by default.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: A factor for tensors before the reduction; 1.0 by default.
        postscale_factor: A factor for the result; 1.0 by default.
        name: Ranks match operations by this name; without one, by the order of their calls.
        process_set: The ranks that take part; all ranks by default.
        ignore_name_scope: Whether to use `name` without the scopes of the graph; False by default.

    Returns:
        The reduced tensor, or IndexedSlices if those were passed.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: The ranks passed different arguments under this name.
        AbortedError: A rank was lost, or Horovod was shut down.

    Examples:
        >>> loss = hvd.allreduce(loss, name="loss")
    """
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    call = Call("HorovodAllreduce", name, ignore_name_scope, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        with device_scope(device_sparse):
            return reduce_slices(call, tensor, reduction)
    with device_scope(device_dense):
        return reduce_group(call, [tensor], reduction, compression)[0]


@without_autograph
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Sequence[Any]:
    """Reduce several tensors as one operation; the results are in their order. Differentiable.

    The tensors may have different types. IndexedSlices among them are reduced one by one.

    Args:
        tensors: The tensors to reduce; their number, shapes and types are the same on all ranks.
        average: Older form of `op`: True for `Average`, False for `Sum`.
        device_dense: Accepted for compatibility.
        device_sparse: Accepted for compatibility.
        compression: How tensors are compressed, such as `Compression.fp16`; not at all by default.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: A factor for tensors before the reduction; 1.0 by default.
        postscale_factor: A factor for the result; 1.0 by default.
        process_set: The ranks that take part; all ranks by default.
        ignore_name_scope: Whether to use `name` without the scopes of the graph; False by default.
        name: Ranks match operations by this name; without one, by the order of their calls.

    Returns:
        The reduced tensors, in the order of `tensors`.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: The ranks passed different arguments under this name.
        AbortedError: A rank was lost, or Horovod was shut down.
    """
    group = check_group(tensors)
    if not group:
        return tensors
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    sparse = [i for i, tensor in enumerate(group) if isinstance(tensor, tf.IndexedSlices)]
    for index in sparse:
        with device_scope(device_sparse):
            own_name = None if name is None else f"{name}.{index}"
            call = Call("HorovodAllreduce", own_name, ignore_name_scope, process_set)
            group[index] = reduce_slices(call, group[index], reduction)
    dense = [i for i in range(len(group)) if i not in sparse]
    if dense:
        with device_scope(device_dense):
            call = Call("HorovodGroupedAllreduce", name, ignore_name_scope, process_set)
            reduced = reduce_group(call, [group[index] for index in dense], reduction, compression)
            for index, tensor in zip(dense, reduced, strict=True):
                group[index] = tensor
    return group


def reduce_group(
    call: Call,
    tensors: Sequence[tf.Tensor],
    reduction: Reduction,
    compression: type[Compressor],
) -> list[tf.Tensor]:
    """Reduce dense tensors as one operation."""
    given = [as_tensor(tensor) for tensor in tensors]
    return run_compressed(lambda sent: reduce(call, sent, reduction), given, compression)


def reduce_slices(call: Call, slices: tf.IndexedSlices, reduction: Reduction) -> tf.IndexedSlices:
    """Gather the slices of all ranks; slices that share an index add up when they are used."""
    if reduction.op not in (Sum, Average):
        raise NotImplementedError(
            f"{reduction.op.name.capitalize()} is not defined for IndexedSlices: use Sum or "
            "Average, or convert them with tf.convert_to_tensor"
        )
    if reduction.is_scaled:
        raise NotImplementedError(
            "prescale_factor and postscale_factor do not apply to IndexedSlices"
        )
    values, indices = gather(call, [as_tensor(slices.values), as_tensor(slices.indices)])
    if reduction.op is Average:
        values = values / tf.cast(set_size(call.process_set), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


@without_autograph
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor over all ranks and keep this rank's rows. Differentiable.

    Args:
        tensor: A tensor of at least one dimension, with the same shape and type on all ranks.
        device_dense: Accepted for compatibility.
        compression: How tensors are compressed, such as `Compression.fp16`; not at all by default.
        op: `Average` or `Sum`.
        name: Ranks match operations by this name; without one, by the order of their calls.
        process_set: The ranks that take part; all ranks by default.
        ignore_name_scope: Whether to use `name` without the scopes of the graph; False by default.
        prescale_factor: A factor for tensors before the reduction; 1.0 by default.
        postscale_factor: A factor for the result; 1.0 by default.

    Returns:
        This rank's rows of the reduced tensor.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: The ranks passed different arguments under this name.
        AbortedError: A rank was lost, or Horovod was shut down.
    """
    reduction = _scatter_reduction(op, prescale_factor, postscale_factor)
    call = Call("HorovodReducescatter", name, ignore_name_scope, process_set)
    with device_scope(device_dense):
        given = [as_tensor(tensor)]
        return run_compressed(lambda sent: _scatter(call, sent, reduction), given, compression)[0]


@without_autograph
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Sequence[tf.Tensor]:
    """Reduce and scatter several tensors as one operation. Differentiable.

    Args:
        tensors: A list of tensors, each of which `reducescatter` would accept.
        device_dense: Accepted for compatibility.
        compression: How tensors are compressed, such as `Compression.fp16`; not at all by default.
        op: `Average` or `Sum`.
        process_set: The ranks that take part; all ranks by default.
        prescale_factor: A factor for tensors before the reduction; 1.0 by default.
        postscale_factor: A factor for the result; 1.0 by default.

    Returns:
        This rank's rows of each reduced tensor, in the order of `tensors`.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: The ranks passed different arguments under this name.
        AbortedError: A rank was lost, or Horovod was shut down.
    """
    group = check_group(tensors)
    if not group:
        return tensors
    reduction = _scatter_reduction(op, prescale_factor, postscale_factor)
    call = Call("HorovodGroupedReducescatter", None, False, process_set)
    with device_scope(device_dense):
        return run_compressed(lambda sent: _scatter(call, sent, reduction), group, compression)


def _scatter_reduction(op: ReduceOp, prescale_factor: float, postscale_factor: float) -> Reduction:
    reduction = _reduction(op, None, prescale_factor, postscale_factor)
    if reduction.op not in (Sum, Average):
        raise AbortedError.with_message(
            f"reducescatter takes Sum or Average, not {reduction.op.name.capitalize()}"
        )
    return reduction


def _scatter(call: Call, tensors: Sequence[tf.Tensor], reduction: Reduction) -> list[tf.Tensor]:
    """Reduce tensors with one request to the engine; each rank keeps its rows.

    By upstream's convention the gradient is gathered and scaled, and with Sum multiplied by the
    number of ranks.
    """

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        reducescatter = Collective(Kind.REDUCESCATTER, name, call.set_id, reduction)
        inputs = reduction_inputs(sources, reduction)
        return list(bridge.wait(runtime.submit(reducescatter, inputs, background=False)))

    def whole(gradients: list[tf.Tensor], indices: list[int]) -> list[tf.Tensor]:
        factor = reduction.prescale_factor * reduction.postscale_factor
        if reduction.op is Sum:
            factor = tf.cast(set_size(call.process_set), tf.float64) * factor
        gathered = gather(call.backward(), gradients)
        results = []
        for index, tensor in zip(indices, gathered, strict=True):
            tensor.set_shape(tensors[index].shape)
            results.append(tensor * tf.cast(factor, tensor.dtype))
        return results

    return call.run_differentiably(collective, tensors, spec_with_any_rows, whole)


def _reduction(
    op: ReduceOp | None, average: bool | None, prescale_factor: float, postscale_factor: float
) -> Reduction:
    """Return the reduction that the arguments of a public function choose."""
    if average is not None and op is None:
        # Two frames are between this one and the script: the public function, and the wrapper
        # that keeps AutoGraph away.
        warnings.warn(
            "average= is deprecated: pass op=Average or op=Sum instead",
            DeprecationWarning,
            stacklevel=4,
        )
        op, average = (Average if average else Sum), None
    try:
        op = resolve_reduce_op(op, average)
    except ValueError as error:
        raise InvalidArgumentError.with_message(str(error)) from None
    return Reduction(op, prescale_factor, postscale_factor)
