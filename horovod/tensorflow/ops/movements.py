"""Gather, broadcast and exchange (alltoall) tensors; `horovod.tensorflow` exports the functions.

A root is a rank of the whole job, even within a process set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.arguments import check_splits, movement_inputs
from horovod.engine.collective import Collective, Kind
from horovod.engine.runtime import runtime
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.bridge import as_tensor, without_autograph
from horovod.tensorflow.ops.call import (
    AVERAGE,
    Call,
    check_group,
    make_differentiable,
    reduce,
    restore_types,
    spec_like,
    spec_with_any_rows,
)
from horovod.tensorflow.ops.info_ops import own_rank


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
        name: Ranks match operations by this name; without one, by the order of their calls.
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
        name: Ranks match operations by this name; without one, by the order of their calls.
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


@without_autograph
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Give every rank the root's tensor. Differentiable.

    Args:
        tensor: A tensor of the same shape and type on all ranks; only the root's values are used.
        root_rank: The rank whose tensor all ranks get, counted among all ranks of the job.
        name: Ranks match operations by this name; without one, by the order of their calls.
        ignore_name_scope: Whether to use `name` without the scopes of the graph; False by default.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The root's tensor.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: The ranks passed different arguments under this name.
        AbortedError: A rank was lost, or Horovod was shut down.
    """
    tensor = as_tensor(tensor)
    call = Call("HorovodBroadcast", name, ignore_name_scope, process_set)

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        (source,) = movement_inputs(sources)
        output = torch.empty_like(source)
        broadcast = Collective(Kind.BROADCAST, name, call.set_id, root_rank=root_rank)
        bridge.wait(runtime.submit(broadcast, [source], [output], background=False))
        return restore_types([output], sources)

    def average_on_root(gradients: list[tf.Tensor], _: list[int]) -> list[tf.Tensor]:
        averages = reduce(call.backward(), gradients, AVERAGE)
        is_root = own_rank() == root_rank
        return [tf.where(is_root, average, tf.zeros_like(average)) for average in averages]

    return call.run_differentiably(collective, [tensor], spec_like, average_on_root)[0]


@without_autograph
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send `splits[i]` rows of the tensor to rank i, and concatenate the received rows.

    Differentiable.

    Args:
        tensor: A tensor of at least one dimension; only the first may differ between ranks.
        splits: The number of rows for each rank; None (the default) for equal numbers.
        name: Ranks match operations by this name; without one, by the order of their calls.
        ignore_name_scope: Whether to use `name` without the scopes of the graph; False by default.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The received rows in the order of ranks; with `splits` also the number of rows from each
        rank.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: The ranks passed different arguments under this name.
        AbortedError: A rank was lost, or Horovod was shut down.
    """
    call = Call("HorovodAlltoall", name, ignore_name_scope, process_set)
    output, received = _exchange(call, as_tensor(tensor), _splits_tensor(splits))
    return output if splits is None else (output, received)


def _exchange(call: Call, tensor: tf.Tensor, splits: tf.Tensor) -> list[tf.Tensor]:
    """Exchange rows; return the received rows and their number from each rank.

    Empty `splits` stand for equal parts.
    """

    def collective(values: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        source, rows = values
        alltoall = Collective(Kind.ALLTOALL, name, call.set_id, splits=check_splits(rows))
        request = runtime.submit(alltoall, movement_inputs([source]), background=False)
        output, received = bridge.wait(request)
        return [*restore_types([output], [source]), torch.tensor(received, dtype=torch.int32)]

    def forward(source: tf.Tensor, rows: tf.Tensor) -> list[tf.Tensor]:
        specs = [spec_with_any_rows(source), tf.TensorSpec([None], tf.int32)]
        outputs[:] = call.run(collective, [source, rows], specs)
        return list(outputs)

    def gradient(dy: Any, _: Any) -> list[Any]:
        """Send the gradients back to where the rows came from; unsent rows get zeros."""
        returned, _ = _exchange(call.backward(), as_tensor(dy), outputs[1])
        unsent = tf.shape(tensor)[0] - tf.shape(returned)[0]
        no_padding = tf.zeros([tf.rank(returned) - 1, 2], tf.int32)
        return [tf.pad(returned, tf.concat([[[0, unsent]], no_padding], 0)), None]

    outputs: list[tf.Tensor] = []
    return make_differentiable(forward, gradient, [tensor, splits])


def _splits_tensor(splits: Any) -> tf.Tensor:
    """Return the splits as a tensor: integers as int32, tensors and other arrays in their type."""
    if splits is None:
        return tf.zeros([0], tf.int32)
    if isinstance(splits, np.ndarray) and splits.dtype.kind in "iu":
        splits = splits.astype(np.int32)  # what numpy computes is int64
    if hasattr(splits, "dtype"):
        return as_tensor(splits)
    return as_tensor(tf.convert_to_tensor(splits, tf.int32))
