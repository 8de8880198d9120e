"""Send one rank's tensor to all ranks; `horovod.tensorflow` exports the function to users.

`root_rank` is a rank of the whole job, even within a process set.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.arguments import movement_inputs
from horovod.engine.collective import Collective, Kind
from horovod.engine.runtime import runtime
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.bridge import as_tensor, without_autograph
from horovod.tensorflow.ops.call import Call, restore_types, spec_like
from horovod.tensorflow.ops.info_ops import own_rank
from horovod.tensorflow.ops.reduction import AVERAGE, reduce


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
        name: The name by which ranks match operations; without one they match the order of their
            calls.
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
