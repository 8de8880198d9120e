"""Let every rank send rows to every other (alltoall); `horovod.tensorflow` exports the function."""

from __future__ import annotations

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
    Call,
    make_differentiable,
    restore_types,
    spec_with_any_rows,
)


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
        name: The name by which ranks match operations; without one they match the order of their
            calls.
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
