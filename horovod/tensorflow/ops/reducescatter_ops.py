"""Reduce tensors, and groups of them, and give each rank some rows of the result.

`horovod.tensorflow` exports the functions to users. Rows are divided as evenly as possible; the
first ranks get one row more where the number of rows is not divisible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.common.compression import run_compressed
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.engine.arguments import reduction_inputs
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.allgather_ops import gather
from horovod.tensorflow.ops.bridge import as_tensor, device_scope, without_autograph
from horovod.tensorflow.ops.call import Call, check_group, spec_with_any_rows
from horovod.tensorflow.ops.errors import AbortedError
from horovod.tensorflow.ops.info_ops import set_size
from horovod.tensorflow.ops.reduction import reduce_op


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
        compression: How tensors are compressed on the way, such as `Compression.fp16`; not at all
            by default.
        op: `Average` or `Sum`.
        name: The name by which ranks match operations; without one they match the order of their
            calls.
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
    reduction = _reduction(op, prescale_factor, postscale_factor)
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
        compression: How tensors are compressed on the way, such as `Compression.fp16`; not at all
            by default.
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
    reduction = _reduction(op, prescale_factor, postscale_factor)
    call = Call("HorovodGroupedReducescatter", None, False, process_set)
    with device_scope(device_dense):
        return run_compressed(lambda sent: _scatter(call, sent, reduction), group, compression)


def _reduction(op: ReduceOp, prescale_factor: float, postscale_factor: float) -> Reduction:
    op = reduce_op(op, None)
    if op not in (Sum, Average):
        raise AbortedError.with_message(
            f"reducescatter takes Sum or Average, not {op.name.capitalize()}"
        )
    return Reduction(op, prescale_factor, postscale_factor)


def _scatter(call: Call, tensors: Sequence[tf.Tensor], reduction: Reduction) -> list[tf.Tensor]:
    """Reduce tensors with one request to the engine; each rank keeps its rows.

    By upstream's convention the gradient is gathered and scaled, and with Sum multiplied by the
    number of ranks.
    """

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        reducescatter = Collective(Kind.REDUCESCATTER, name, call.set_id, reduction)
        inputs = reduction_inputs(sources, reduction)
        request = runtime.submit(reducescatter, inputs, background=False)
        results: list[torch.Tensor] = bridge.wait(request)
        return results

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
