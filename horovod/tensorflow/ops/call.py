"""One call of a collective: its name, its process set, and how it becomes an op.

The modules of the collectives share this one, and `reduce`, by which most of them compute their
gradients. All facts about the job, such as its size, are read when the op runs, because in an
elastic job a graph outlives changes of the ranks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
from tensorflow.python.eager.record import could_possibly_record

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average
from horovod.engine.arguments import reduction_inputs, set_id
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from horovod.engine.submission import check_adasum
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.errors import InvalidArgumentError

AVERAGE = Reduction(Average)


@dataclasses.dataclass
class Call:
    """A call of a collective, by the user or by the gradient of such a call."""

    kind: str  # the name of its ops in a graph, such as "HorovodAllreduce"
    name: str | None
    ignore_name_scope: bool
    process_set: ProcessSet
    wire_name: str | None = None  # the name by which ranks match it, once it is in a graph
    num_gradients: int = 0
    buckets: int = 0  # the number of buckets of the step that this call completes, if it does

    @property
    def set_id(self) -> int:
        return set_id(self.process_set)

    def run(
        self, function: bridge.Function, tensors: Sequence[tf.Tensor], like: Sequence[tf.TensorSpec]
    ) -> list[tf.Tensor]:
        """Call `function` through `bridge.run`, with results of the types and shapes of `like`.

        While a graph is built, an unregistered process set is a ValueError.
        """
        eager = tf.executing_eagerly()
        if not eager:
            set_id(self.process_set)

        def run_and_count(sources: list[torch.Tensor], name: str | None) -> Sequence[torch.Tensor]:
            results = function(sources, name)
            if self.buckets:
                runtime.statistics.end_step(self.buckets)
            return results

        outputs = bridge.run(
            run_and_count,
            tensors,
            like,
            self.name if eager else self._op_name(tensors[0]),
            self.ignore_name_scope,
            self.wire_name,
        )
        if not eager and self.wire_name is None:
            self.wire_name = bridge.wire_name(outputs[0].op, self.ignore_name_scope)
        return outputs

    def run_differentiably(
        self,
        function: bridge.Function,
        tensors: Sequence[tf.Tensor],
        spec_of: Callable[[tf.Tensor], tf.TensorSpec],
        send_back: Callable[[list[tf.Tensor], list[int]], Sequence[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Call `function` as `run` does, and give its results gradients.

        Args:
            function: The function, whose results belong to the tensors one by one.
            tensors: The inputs.
            spec_of: Returns type and shape of the result for an input.
            send_back: Returns the gradients of inputs. It gets the gradients of their results and
                their indices: those whose type allows a gradient, whether or not this rank needs
                them, as all ranks must make the same calls.

        Returns:
            The results.
        """

        def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
            return self.run(function, inputs, [spec_of(tensor) for tensor in inputs])

        def backward(*gradients: Any) -> list[Any]:
            indices = [
                i for i, t in enumerate(tensors) if t.dtype.is_floating or t.dtype.is_complex
            ]
            results: list[Any] = [None] * len(tensors)
            computed = send_back([bridge.as_tensor(gradients[index]) for index in indices], indices)
            for index, result in zip(indices, computed, strict=True):
                results[index] = result
            return results

        return make_differentiable(forward, backward, tensors)

    def backward(self) -> Call:
        """Return the call that carries a gradient of this one.

        In a graph its name is derived from the name of this call. TensorFlow's own name for the
        scope of a gradient depends on the order in which the graph was made, which may differ
        between ranks.
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
        """Return a valid name for the op, the same on all ranks."""
        if self.name is None:
            # TensorFlow names an eager tensor that a function captures by a number of its own,
            # which other ranks do not know.
            common = re.sub(r"(^|/)\d+(?=:|$)", r"\1captured", tensor.name)
            return f"{self.kind}_{re.sub('[^A-Za-z0-9_]', '_', common)}"
        valid = re.sub(r"[^A-Za-z0-9_.\-/>]", "_", self.name)
        return valid if valid[:1].isalnum() else f"{self.kind}_{valid}"


def make_differentiable(
    function: Callable[..., list[tf.Tensor]],
    gradient: Callable[..., list[Any]],
    tensors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Return `function(*tensors)`; `gradient` turns gradients of the outputs into the inputs'."""
    if tf.executing_eagerly() and not could_possibly_record():
        return function(*tensors)

    @tf.custom_gradient
    def recorded(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[Any]]]:
        return function(*inputs), gradient

    return list(recorded(*tensors))


def check_group(tensors: Any) -> list[Any]:
    """Return the members of a group as tensors; IndexedSlices stay as they are."""
    if isinstance(tensors, (tf.Tensor, tf.Variable, tf.IndexedSlices)):
        raise InvalidArgumentError.with_message(
            "a grouped operation takes a list of tensors, not one tensor"
        )
    return [t if isinstance(t, tf.IndexedSlices) else bridge.as_tensor(t) for t in tensors]


def spec_like(tensor: tf.Tensor) -> tf.TensorSpec:
    """Return the specification of an output with the type and shape of an input."""
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def spec_with_any_rows(tensor: tf.Tensor) -> tf.TensorSpec:
    """Return the specification of an output like an input, but with any number of rows."""
    shape = tensor.shape[1:] if tensor.shape.rank else None
    return tf.TensorSpec(None if shape is None else [None, *shape], tensor.dtype)


def restore_types(
    results: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the engine's results in the types of the sources."""
    return [
        result if result.dtype is source.dtype else result.view(source.dtype)
        for result, source in zip(results, sources, strict=True)
    ]


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
