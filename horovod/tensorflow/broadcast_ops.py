"""broadcast of one tensor.

Exported to users by `horovod.tensorflow`. `root_rank` is always a rank of the whole job, also
within a process set.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.runtime import runtime
from horovod.tensorflow import bridge
from horovod.tensorflow.bridge import as_tensor, unconverted
from horovod.tensorflow.call import Call, as_sent, differentiable, movable, same
from horovod.tensorflow.info_ops import own_rank
from horovod.tensorflow.reduction import AVERAGE, reduce


@unconverted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The root's tensor on every rank. Differentiable.

    Args:
        tensor: Of the same shape and type on all ranks; only the root's content counts.
        root_rank: The rank that has it, counted among all ranks of the job.
        name: Ranks match operations by name; left out, by the order of their calls.
        ignore_name_scope: Take `name` as it is, without the scope of the graph.
        process_set: The ranks that take part.

    Raises:
        InvalidArgumentError: This rank passed a wrong argument; nothing was sent.
        FailedPreconditionError: Ranks passed different things under this name.
        AbortedError: A rank is lost.
    """
    tensor = as_tensor(tensor)
    call = Call("HorovodBroadcast", name, ignore_name_scope, process_set)

    def collective(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        (source,) = movable(sources)
        output = torch.empty_like(source)
        bridge.wait(
            runtime.broadcast(
                source, output, root_rank, name, process_set_id=call.set_id, background=False
            )
        )
        return as_sent([output], sources)

    def forward(source: tf.Tensor) -> list[tf.Tensor]:
        return call.run(collective, [source], [same(source)])

    def gradient(dy: Any) -> list[Any]:
        (averaged,) = reduce(call.backward(), [as_tensor(dy)], AVERAGE)
        return [tf.where(own_rank() == root_rank, averaged, tf.zeros_like(averaged))]

    return differentiable(forward, gradient, [tensor])[0]
