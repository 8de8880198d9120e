"""Gather tensors and groups of them from all ranks; `horovod.tensorflow` exports the functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.arguments import movement_inputs
from horovod.engine.collective import Collective, Kind
from horovod.engine.runtime import runtime
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.bridge import as_tensor, without_autograph
from horovod.tensorflow.ops.call import Call, check_group, restore_types, spec_with_any_rows
from horovod.tensorflow.ops.reduction import AVERAGE, reduce


@without_autograph
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the ranks' tensors along the first dimension. Differentiable.

    Args:
        tensor: A tensor of at least one dimension; only the first may differ between ranks.
        name: The name by which ranks match operations; without one they match the order of their
            calls.
        ignore_name_scope: Whether to use `name` without the scopes of the graph; False by default.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The tensors of all ranks in the order of ranks.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: The ranks passed different arguments under this name.
        AbortedError: A rank was lost, or Horovod was shut down.
    """
    call = Call("HorovodAllgather", name, ignore_name_scope, process_set)
    return gather(call, [as_tensor(tensor)])[0]


@without_autograph
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Sequence[tf.Tensor]:
    """Gather several tensors as one operation. Differentiable.

    Args:
        tensors: A list of tensors, each of which `allgather` would accept.
        name: The name by which ranks match operations; without one they match the order of their
            calls.
        ignore_name_scope: Whether to use `name` without the scopes of the graph; False by default.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The gathered tensors, in the order of `tensors`.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: The ranks passed different arguments under this name.
        AbortedError: A rank was lost, or Horovod was shut down.
    """
    group = check_group(tensors)
    if not group:
        return tensors
    call = Call("HorovodGroupedAllgather", name, ignore_name_scope, process_set)
    return gather(call, group)


def gather(call: Call, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gather tensors with one request to the engine.

    By upstream's convention the gradient is averaged over the ranks, and each rank gets its rows.
    """

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        allgather = Collective(Kind.ALLGATHER, name, call.set_id)
        request = runtime.submit(allgather, movement_inputs(sources), background=False)
        return restore_types(bridge.wait(request), sources)

    def own_rows(gradients: list[tf.Tensor], indices: list[int]) -> list[tf.Tensor]:
        backward = call.backward()
        averaged = reduce(backward, gradients, AVERAGE)
        counts = tf.stack([tf.shape(tensors[index])[0] for index in indices])
        begins = _first_rows(backward, counts)
        parts = []
        for position, (index, whole) in enumerate(zip(indices, averaged, strict=True)):
            part = whole[begins[position] : begins[position] + counts[position]]
            part.set_shape(tensors[index].shape)
            parts.append(part)
        return parts

    return call.run_differentiably(collective, tensors, spec_with_any_rows, own_rows)


def _first_rows(call: Call, counts: tf.Tensor) -> tf.Tensor:
    """Return where this rank's rows begin in each gathered tensor, given its numbers of rows."""

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        mine = sources[0].view(1, -1)
        name = None if name is None else f"{name}.rows"
        allgather = Collective(Kind.ALLGATHER, name, call.set_id)
        (table,) = bridge.wait(runtime.submit(allgather, [mine], background=False))
        return [table[: call.process_set.rank()].sum(dim=0, dtype=torch.int32)]

    return call.run(collective, [counts], [tf.TensorSpec(counts.shape, tf.int32)])[0]
