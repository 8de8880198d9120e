"""Reduce tensors, and groups of them, over all ranks; IndexedSlices are gathered instead.

`horovod.tensorflow` exports the functions to users.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.compression import run_compressed
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.engine.collective import Reduction
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.ops.allgather_ops import gather
from horovod.tensorflow.ops.bridge import as_tensor, device_scope, without_autograph
from horovod.tensorflow.ops.call import Call, check_group
from horovod.tensorflow.ops.info_ops import set_size
from horovod.tensorflow.ops.reduction import reduce, reduce_op


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
        compression: How tensors are compressed on the way, such as `Compression.fp16`; not at all
            by default.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: A factor for tensors before the reduction; 1.0 by default.
        postscale_factor: A factor for the result; 1.0 by default.
        name: The name by which ranks match operations; without one they match the order of their
            calls.
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
    reduction = Reduction(reduce_op(op, average), prescale_factor, postscale_factor)
    call = Call("HorovodAllreduce", name, ignore_name_scope, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        with device_scope(device_sparse):
            return reduce_slices(call, tensor, reduction)
    with device_scope(device_dense):
        compressed, context = compression.compress(as_tensor(tensor))
        return compression.decompress(reduce(call, [compressed], reduction)[0], context)


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
        compression: How tensors are compressed on the way, such as `Compression.fp16`; not at all
            by default.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: A factor for tensors before the reduction; 1.0 by default.
        postscale_factor: A factor for the result; 1.0 by default.
        process_set: The ranks that take part; all ranks by default.
        ignore_name_scope: Whether to use `name` without the scopes of the graph; False by default.
        name: The name by which ranks match operations; without one they match the order of their
            calls.

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
    reduction = Reduction(reduce_op(op, average), prescale_factor, postscale_factor)
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
