"""allreduce of one tensor and of groups; IndexedSlices are gathered instead.

Exported to users by `horovod.tensorflow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.tensorflow.allgather_ops import gather
from horovod.tensorflow.bridge import as_tensor, placed, unconverted
from horovod.tensorflow.call import Call, check_group
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.info_ops import set_size
from horovod.tensorflow.reduction import Reduction, reduce, reduce_op


@unconverted
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
    """Reduce a tensor over all ranks; also a variable, an array or IndexedSlices. Differentiable.

    IndexedSlices take Sum and Average: the result has all ranks' slices.

    Args:
        tensor: Of the same shape and type on all ranks.
        average: Older form of `op`: True for `Average`, False for `Sum`.
        device_dense: Accepted for compatibility.
        device_sparse: Accepted for compatibility.
        compression: What travels in place of a tensor, such as `Compression.fp16`.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: Multiplies tensors before the reduction.
        postscale_factor: Multiplies the result.
        name: Ranks match operations by name; left out, by the order of their calls.
        process_set: The ranks that take part.
        ignore_name_scope: Take `name` as it is, without the scope of the graph.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: Ranks passed different things under this name.
        AbortedError: A rank is lost.

    Examples:
        >>> loss = hvd.allreduce(loss, name="loss")
    """
    reduction = Reduction(reduce_op(op, average), prescale_factor, postscale_factor)
    call = Call("HorovodAllreduce", name, ignore_name_scope, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        with placed(device_sparse):
            return reduce_slices(call, tensor, reduction)
    with placed(device_dense):
        compressed, context = compression.compress(as_tensor(tensor))
        return compression.decompress(reduce(call, [compressed], reduction)[0], context)


@unconverted
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

    They may be of different types. IndexedSlices among them are reduced one by one.

    Args:
        tensors: The same number, shapes and types on all ranks.
        average: Older form of `op`: True for `Average`, False for `Sum`.
        device_dense: Accepted for compatibility.
        device_sparse: Accepted for compatibility.
        compression: What travels in place of a tensor, such as `Compression.fp16`.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: Multiplies tensors before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.
        ignore_name_scope: Take `name` as it is, without the scope of the graph.
        name: Ranks match operations by name; left out, by the order of their calls.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: Ranks passed different things under this name.
        AbortedError: A rank is lost.
    """
    group = check_group(tensors)
    if not group:
        return tensors
    reduction = Reduction(reduce_op(op, average), prescale_factor, postscale_factor)
    sparse = [i for i, tensor in enumerate(group) if isinstance(tensor, tf.IndexedSlices)]
    for index in sparse:
        with placed(device_sparse):
            own_name = None if name is None else f"{name}.{index}"
            call = Call("HorovodAllreduce", own_name, ignore_name_scope, process_set)
            group[index] = reduce_slices(call, group[index], reduction)
    dense = [i for i in range(len(group)) if i not in sparse]
    if dense:
        with placed(device_dense):
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
    pairs = [compression.compress(as_tensor(tensor)) for tensor in tensors]
    reduced = reduce(call, [tensor for tensor, _ in pairs], reduction)
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


def reduce_slices(call: Call, slices: tf.IndexedSlices, reduction: Reduction) -> tf.IndexedSlices:
    """All ranks' slices; an index that several ranks have comes several times, which sums them."""
    if reduction.op not in (Sum, Average):
        raise NotImplementedError(
            f"{reduction.op.name.capitalize()} is not defined for IndexedSlices: use Sum or "
            "Average, or convert them with tf.convert_to_tensor"
        )
    if reduction != Reduction(reduction.op):
        raise NotImplementedError(
            "prescale_factor and postscale_factor do not apply to IndexedSlices"
        )
    values, indices = gather(call, [as_tensor(slices.values), as_tensor(slices.indices)])
    if reduction.op is Average:
        values = values / tf.cast(set_size(call.process_set), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)
