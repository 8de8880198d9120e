"""reducescatter of one tensor and of groups.

Exported to users by `horovod.tensorflow`. Rows are dealt out as evenly as possible, the first
ranks getting one more where they do not divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.engine.runtime import runtime
from horovod.tensorflow import bridge
from horovod.tensorflow.allgather_ops import gather
from horovod.tensorflow.bridge import as_tensor, placed, unconverted
from horovod.tensorflow.call import Call, any_rows, check_group, differentiable, for_floats
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.errors import AbortedError
from horovod.tensorflow.info_ops import set_size
from horovod.tensorflow.reduction import Reduction, reduce_op


@unconverted
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
        tensor: Of at least one dimension, of the same shape and type on all ranks.
        device_dense: Accepted for compatibility.
        compression: What travels in place of a tensor, such as `Compression.fp16`.
        op: `Average` or `Sum`.
        name: Ranks match operations by name; left out, by the order of their calls.
        process_set: The ranks that take part.
        ignore_name_scope: Take `name` as it is, without the scope of the graph.
        prescale_factor: Multiplies tensors before the reduction.
        postscale_factor: Multiplies the result.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: Ranks passed different things under this name.
        AbortedError: A rank is lost.
    """
    reduction = _reduction(op, prescale_factor, postscale_factor)
    call = Call("HorovodReducescatter", name, ignore_name_scope, process_set)
    with placed(device_dense):
        compressed, context = compression.compress(as_tensor(tensor))
        return compression.decompress(_scatter(call, [compressed], reduction)[0], context)


@unconverted
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
        tensors: Each as `reducescatter` takes it.
        device_dense: Accepted for compatibility.
        compression: What travels in place of a tensor, such as `Compression.fp16`.
        op: `Average` or `Sum`.
        process_set: The ranks that take part.
        prescale_factor: Multiplies tensors before the reduction.
        postscale_factor: Multiplies the result.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: Ranks passed different things under this name.
        AbortedError: A rank is lost.
    """
    group = check_group(tensors)
    if not group:
        return tensors
    reduction = _reduction(op, prescale_factor, postscale_factor)
    call = Call("HorovodGroupedReducescatter", None, False, process_set)
    with placed(device_dense):
        pairs = [compression.compress(tensor) for tensor in group]
        reduced = _scatter(call, [tensor for tensor, _ in pairs], reduction)
        return [
            compression.decompress(tensor, context)
            for tensor, (_, context) in zip(reduced, pairs, strict=True)
        ]


def _reduction(op: ReduceOp, prescale_factor: float, postscale_factor: float) -> Reduction:
    op = reduce_op(op, None)
    if op not in (Sum, Average):
        raise AbortedError.because(
            f"reducescatter takes Sum or Average, not {op.name.capitalize()}"
        )
    return Reduction(op, prescale_factor, postscale_factor)


def _scatter(call: Call, tensors: Sequence[tf.Tensor], reduction: Reduction) -> list[tf.Tensor]:
    """Reduce tensors with one request to the engine, each rank keeping its rows.

    The gradient is gathered and scaled, and a Sum counts once for every rank of the set:
    upstream's convention.
    """

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        request = runtime.reducescatter(
            reduction.inputs(sources),
            name,
            reduction.op,
            prescale=reduction.prescale_factor,
            postscale=reduction.postscale_factor,
            process_set_id=call.set_id,
            background=False,
        )
        results: list[torch.Tensor] = bridge.wait(request)
        return results

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return call.run(collective, inputs, [any_rows(tensor) for tensor in inputs])

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

    def gradient(*gradients: Any) -> list[Any]:
        return for_floats(whole, gradients, tensors)

    return differentiable(forward, gradient, tensors)
