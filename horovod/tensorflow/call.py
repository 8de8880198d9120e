"""One call of a collective: what it is named, who takes part, and how it becomes an op.

What the modules of the collectives share. Everything about the job, its sizes included, is read
when the op runs: in an elastic job a graph outlives changes of the ranks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
from tensorflow.python.eager.record import could_possibly_record

from horovod.common.process_sets import ProcessSet
from horovod.engine.arguments import movement_input, set_id
from horovod.engine.runtime import runtime
from horovod.tensorflow import bridge
from horovod.tensorflow.errors import InvalidArgumentError

# torch knows these types but moves only their signed twins.
_CARRIERS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


@dataclasses.dataclass
class Call:
    """How the user, or the gradient of what the user called, called a collective."""

    kind: str  # as graph ops are named, such as "HorovodAllreduce"
    name: str | None
    ignore_name_scope: bool
    process_set: ProcessSet
    wire_name: str | None = None  # what the ranks know it by, once it is in a graph
    num_gradients: int = 0
    buckets: int = 0  # of the step that is complete with this call; 0: it completes none

    @property
    def set_id(self) -> int:
        return set_id(self.process_set)

    def run(
        self, function: bridge.Function, tensors: Sequence[tf.Tensor], like: Sequence[tf.TensorSpec]
    ) -> list[tf.Tensor]:
        """Have `function` (see `bridge.run`) make tensors that are `like` these.

        `ValueError` while a graph is built for a process set that nobody has registered.
        """
        eager = tf.executing_eagerly()
        if not eager:
            set_id(self.process_set)
        outputs = bridge.run(
            self._completing(function) if self.buckets else function,
            tensors,
            [spec.dtype for spec in like],
            [spec.shape for spec in like],
            self.name if eager else self._op_name(tensors[0]),
            self.ignore_name_scope,
            self.wire_name,
        )
        if not eager and self.wire_name is None:
            self.wire_name = bridge.wire_name(outputs[0].op, self.ignore_name_scope)
        return outputs

    def _completing(self, function: bridge.Function) -> bridge.Function:
        def run(sources: list[torch.Tensor], name: str | None) -> Sequence[torch.Tensor]:
            results = function(sources, name)
            runtime.statistics.end_step(self.buckets)
            return results

        return run

    def backward(self) -> Call:
        """The call that carries a gradient of this one.

        In a graph its name comes from this one's: how TensorFlow names the scope of a gradient
        depends on the order in which the graph was made, which may differ between ranks.
        """
        self.num_gradients += 1
        suffix = "grad" if self.num_gradients == 1 else f"grad{self.num_gradients}"
        return Call(
            self.kind,
            None if self.name is None else f"{self.name}.grad",
            self.ignore_name_scope,
            self.process_set,
            None if self.wire_name is None else f"{self.wire_name}.{suffix}",
        )

    def _op_name(self, tensor: tf.Tensor) -> str:
        if self.name is None:
            # TensorFlow names an eager tensor that a function captures by a number of its own,
            # which other ranks do not know.
            common = re.sub(r"(^|/)\d+(?=:|$)", r"\1captured", tensor.name)
            return f"{self.kind}_{re.sub('[^A-Za-z0-9_]', '_', common)}"
        valid = re.sub(r"[^A-Za-z0-9_.\-/>]", "_", self.name)
        return valid if valid[:1].isalnum() else f"{self.kind}_{valid}"


def differentiable(
    function: Callable[..., list[tf.Tensor]],
    gradient: Callable[..., list[Any]],
    tensors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """`function(*tensors)`, whose gradient is `gradient(*gradients of the outputs)`."""
    if tf.executing_eagerly() and not could_possibly_record():
        return function(*tensors)

    @tf.custom_gradient
    def recorded(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[Any]]]:
        return function(*inputs), gradient

    return list(recorded(*tensors))


def for_floats(
    function: Callable[[list[tf.Tensor], list[int]], Sequence[tf.Tensor]],
    gradients: Sequence[Any],
    tensors: Sequence[tf.Tensor],
) -> list[Any]:
    """Gradients for `tensors`: of those that have any, `function(gradients, their indices)`.

    All ranks must make the same calls, so these are the tensors whose type allows a gradient.
    """
    chosen = [i for i, t in enumerate(tensors) if t.dtype.is_floating or t.dtype.is_complex]
    results: list[Any] = [None] * len(tensors)
    made = function([bridge.as_tensor(gradients[index]) for index in chosen], chosen)
    for index, result in zip(chosen, made, strict=True):
        results[index] = result
    return results


def check_group(tensors: Any) -> list[Any]:
    """The members of a group: tensors, or IndexedSlices as they are."""
    if isinstance(tensors, (tf.Tensor, tf.Variable, tf.IndexedSlices)):
        raise InvalidArgumentError.because(
            "a grouped operation takes a list of tensors, not one tensor"
        )
    return [t if isinstance(t, tf.IndexedSlices) else bridge.as_tensor(t) for t in tensors]


def same(tensor: tf.Tensor) -> tf.TensorSpec:
    """What an output that is like an input looks like in a graph."""
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def any_rows(tensor: tf.Tensor) -> tf.TensorSpec:
    """The same with any number of rows."""
    shape = tensor.shape[1:] if tensor.shape.rank else None
    return tf.TensorSpec(None if shape is None else [None, *shape], tensor.dtype)


def movable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors for the engine to move."""
    return [
        tensor.view(_CARRIERS[tensor.dtype])
        if tensor.dtype in _CARRIERS
        else movement_input(tensor)
        for tensor in tensors
    ]


def as_sent(results: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the engine moved, in the types that went in."""
    return [
        result if result.dtype is source.dtype else result.view(source.dtype)
        for result, source in zip(results, sources, strict=True)
    ]
