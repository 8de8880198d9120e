"""Reduces dense tensors, for allreduce, tapes, optimizers and the gradients of most operations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import global_process_set
from horovod.common.reduce_op import Adasum, Average, ReduceOp, Sum
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import reduction_input
from horovod.engine.runtime import runtime
from horovod.tensorflow import bridge
from horovod.tensorflow.call import Call, for_floats, make_differentiable, spec_like
from horovod.tensorflow.errors import InvalidArgumentError


@dataclass(frozen=True)
class Reduction:
    """A reduction: its operation, and factors before and after it."""

    op: ReduceOp
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors for the engine; ValueError if the operation refuses their type."""
        is_scaled = self.prescale_factor != 1.0 or self.postscale_factor != 1.0
        return [reduction_input(tensor, self.op, is_scaled) for tensor in tensors]


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
    if reduction.op is Adasum and call.process_set is not global_process_set:
        raise NotImplementedError("Adasum works on the global process set only")

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        inputs = reduction.inputs(sources)
        outputs = [torch.empty_like(source) for source in inputs]
        bridge.wait(
            runtime.allreduce(
                inputs,
                outputs,
                name,
                reduction.op,
                prescale=reduction.prescale_factor,
                postscale=reduction.postscale_factor,
                process_set_id=call.set_id,
                background=False,
            )
        )
        return outputs

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return call.run(collective, inputs, [spec_like(tensor) for tensor in inputs])

    def gradient(*gradients: Any) -> list[Any]:
        return for_floats(
            lambda chosen, _: reduce(call.backward(), chosen, reduction), gradients, tensors
        )

    return make_differentiable(forward, gradient, tensors)
