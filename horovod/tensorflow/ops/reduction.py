"""Reduces dense tensors, for allreduce, tapes, optimizers and the gradients of most operations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import tensorflow as tf
import torch

from horovod.common.process_sets import global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import reduction_inputs
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from horovod.engine.submission import check_adasum
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.call import Call, spec_like
from horovod.tensorflow.ops.errors import InvalidArgumentError

AVERAGE = Reduction(Average)


def reduce_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation that the arguments `op` and `average` of a public function choose."""
    if average is not None and op is None:
        # Two frames are between this one and the script: the public function, and the wrapper
        # that keeps AutoGraph away.
        warnings.warn(
            "average= is deprecated: pass op=Average or op=Sum instead",
            DeprecationWarning,
            stacklevel=4,
        )
        return Average if average else Sum
    try:
        return resolve_reduce_op(op, average)
    except ValueError as error:
        raise InvalidArgumentError.with_message(str(error)) from None


def reduce(call: Call, tensors: Sequence[tf.Tensor], reduction: Reduction) -> list[tf.Tensor]:
    """Reduce the tensors with one request to the engine. Differentiable.

    By upstream's convention the gradients are reduced in the same way, for every operation.
    """
    check_adasum(reduction, all_ranks=call.process_set is global_process_set)

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        inputs = reduction_inputs(sources, reduction)
        outputs = [torch.empty_like(source) for source in inputs]
        allreduce = Collective(Kind.ALLREDUCE, name, call.set_id, reduction)
        bridge.wait(runtime.submit(allreduce, inputs, outputs, background=False))
        return outputs

    def reduce_too(gradients: list[tf.Tensor], _: list[int]) -> list[tf.Tensor]:
        return reduce(call.backward(), gradients, reduction)

    return call.run_differentiably(collective, tensors, spec_like, reduce_too)
