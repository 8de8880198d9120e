"""Upstream's path of the collectives: scripts import every operation from here.

The operations are in the folder `ops`. This module has only `join`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
import torch

from horovod.common.reduce_op import Adasum, Max, Min, Product
from horovod.engine import shared_api as _shared_api
from horovod.engine.runtime import runtime
from horovod.engine.shared_api import *
from horovod.engine.shared_api import _basics, init, is_homogeneous, shutdown
from horovod.tensorflow.functions import broadcast_
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.info_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from horovod.tensorflow.ops.movements import allgather, alltoall, broadcast, grouped_allgather
from horovod.tensorflow.ops.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)


@bridge.without_autograph
def join() -> tf.Tensor:
    """Announce that this rank has no more data, and wait until all ranks have announced it.

    Meanwhile the rank takes part in the others' allreduces with neutral values.

    Returns:
        The rank that joined last, as an int32 scalar.
    """

    def collective(_: list[torch.Tensor], __: str | None) -> Sequence[torch.Tensor]:
        last = bridge.wait(runtime.join(background=False))
        return [torch.tensor(last, dtype=torch.int32)]

    return bridge.run(collective, [], [bridge.INT32_SCALAR], "HorovodJoin")[0]


__all__ = [
    "Adasum",
    "Max",
    "Min",
    "Product",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "shutdown",
    "size_op",
]
__all__ += _shared_api.__all__
