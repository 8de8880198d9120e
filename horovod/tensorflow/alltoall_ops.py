"""alltoall: every rank sends rows to every other.

Exported to users by `horovod.tensorflow`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.arguments import check_splits
from horovod.engine.runtime import runtime
from horovod.tensorflow import bridge
from horovod.tensorflow.bridge import as_tensor, unconverted
from horovod.tensorflow.call import Call, any_rows, as_sent, differentiable, movable


@unconverted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send `splits[i]` rows of the tensor to rank i, and concatenate what the ranks sent us.

    Without `splits` every rank gets an equal part and the result is a tensor; with them it comes
    with the numbers of rows received from each rank. Differentiable.

    Args:
        tensor: Of at least one dimension; only the first may differ between ranks.
        splits: How many rows each rank gets; None: equally many.
        name: Ranks match operations by name; left out, by the order of their calls.
        ignore_name_scope: Take `name` as it is, without the scope of the graph.
        process_set: The ranks that take part.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: Ranks passed different things under this name.
        AbortedError: A rank is lost.
    """
    call = Call("HorovodAlltoall", name, ignore_name_scope, process_set)
    output, received = _exchange(call, as_tensor(tensor), _numbers(splits))
    return output if splits is None else (output, received)


def _exchange(call: Call, tensor: tf.Tensor, splits: tf.Tensor) -> list[tf.Tensor]:
    """What arrived, and how many rows of it from each rank. No splits: equal parts."""

    def collective(values: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        source, rows = values
        counts = check_splits(rows) or None
        (carrier,) = movable([source])
        request = runtime.alltoall(
            carrier, counts, name, process_set_id=call.set_id, background=False
        )
        output, received = bridge.wait(request)
        return [*as_sent([output], [source]), torch.tensor(received, dtype=torch.int32)]

    def forward(source: tf.Tensor, rows: tf.Tensor) -> list[tf.Tensor]:
        likewise = [any_rows(source), tf.TensorSpec([None], tf.int32)]
        outputs[:] = call.run(collective, [source, rows], likewise)
        return list(outputs)

    def gradient(dy: Any, _: Any) -> list[Any]:
        """The gradients travel back the way the rows came. Unsent rows have none."""
        returned, _ = _exchange(call.backward(), as_tensor(dy), outputs[1])
        unsent = tf.shape(tensor)[0] - tf.shape(returned)[0]
        nowhere = tf.zeros([tf.rank(returned) - 1, 2], tf.int32)
        return [tf.pad(returned, tf.concat([[[0, unsent]], nowhere], 0)), None]

    outputs: list[tf.Tensor] = []
    return differentiable(forward, gradient, [tensor, splits])


def _numbers(splits: Any) -> tf.Tensor:
    """The splits as a tensor: plain numbers as int32, what has a type as it is."""
    if splits is None:
        return tf.zeros([0], tf.int32)
    if hasattr(splits, "dtype"):
        return as_tensor(splits)
    return as_tensor(tf.convert_to_tensor(splits, tf.int32))
