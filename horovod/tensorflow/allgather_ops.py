"""allgather of one tensor and of groups.

Exported to users by `horovod.tensorflow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.runtime import runtime
from horovod.tensorflow import bridge
from horovod.tensorflow.bridge import as_tensor, unconverted
from horovod.tensorflow.call import (
    Call,
    any_rows,
    as_sent,
    check_group,
    differentiable,
    for_floats,
    movable,
)
from horovod.tensorflow.reduction import AVERAGE, reduce


@unconverted
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the ranks' tensors along the first dimension. Differentiable.

    Args:
        tensor: Of at least one dimension; only the first may differ between ranks.
        name: Ranks match operations by name; left out, by the order of their calls.
        ignore_name_scope: Take `name` as it is, without the scope of the graph.
        process_set: The ranks that take part.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: Ranks passed different things under this name.
        AbortedError: A rank is lost.
    """
    call = Call("HorovodAllgather", name, ignore_name_scope, process_set)
    return gather(call, [as_tensor(tensor)])[0]


@unconverted
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Sequence[tf.Tensor]:
    """Gather several tensors as one operation. Differentiable.

    Args:
        tensors: Each as `allgather` takes it.
        name: Ranks match operations by name; left out, by the order of their calls.
        ignore_name_scope: Take `name` as it is, without the scope of the graph.
        process_set: The ranks that take part.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: Ranks passed different things under this name.
        AbortedError: A rank is lost.
    """
    group = check_group(tensors)
    if not group:
        return tensors
    call = Call("HorovodGroupedAllgather", name, ignore_name_scope, process_set)
    return gather(call, group)


def gather(call: Call, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gather tensors with one request to the engine.

    The gradient is averaged over the ranks, and each gets its own rows: upstream's convention.
    """

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        request = runtime.allgather(
            movable(sources), name, process_set_id=call.set_id, background=False
        )
        return as_sent(bridge.wait(request), sources)

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return call.run(collective, inputs, [any_rows(tensor) for tensor in inputs])

    def own_rows(gradients: list[tf.Tensor], indices: list[int]) -> list[tf.Tensor]:
        backward = call.backward()
        averaged = reduce(backward, gradients, AVERAGE)
        counts = tf.stack([tf.shape(tensors[index])[0] for index in indices])
        begins = _first_rows(backward, counts)
        parts = []
        for place, (index, whole) in enumerate(zip(indices, averaged, strict=True)):
            part = whole[begins[place] : begins[place] + counts[place]]
            part.set_shape(tensors[index].shape)
            parts.append(part)
        return parts

    def gradient(*gradients: Any) -> list[Any]:
        return for_floats(own_rows, gradients, tensors)

    return differentiable(forward, gradient, tensors)


def _first_rows(call: Call, counts: tf.Tensor) -> tf.Tensor:
    """Where this rank's rows begin in what was gathered, given how many it has of each."""

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        mine = sources[0].view(1, -1)
        name = None if name is None else f"{name}.rows"
        (table,) = bridge.wait(
            runtime.allgather([mine], name, process_set_id=call.set_id, background=False)
        )
        return [table[: call.process_set.rank()].sum(dim=0, dtype=torch.int32)]

    return call.run(collective, [counts], [tf.TensorSpec(counts.shape, tf.int32)])[0]
