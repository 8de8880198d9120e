"""Upstream's home of the collectives: every operation under the name scripts import it by.

The operations live in one module each (``allreduce_ops``, ...); here are the basics of this
binding and `join`.
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
from horovod.tensorflow import bridge
from horovod.tensorflow.allgather_ops import allgather, grouped_allgather
from horovod.tensorflow.allreduce_ops import allreduce, grouped_allreduce
from horovod.tensorflow.alltoall_ops import alltoall
from horovod.tensorflow.broadcast_ops import broadcast
from horovod.tensorflow.functions import broadcast_
from horovod.tensorflow.info_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from horovod.tensorflow.reducescatter_ops import grouped_reducescatter, reducescatter


@bridge.unconverted
def join() -> tf.Tensor:
    """Say that this rank has no more data; wait until all ranks say so.

    Meanwhile the rank takes part in the others' allreduces with neutral elements. The result is
    the rank that joined last.
    """

    def collective(_: list[torch.Tensor], __: str | None) -> Sequence[torch.Tensor]:
        last = bridge.wait(runtime.join(background=False))
        return [torch.tensor(last, dtype=torch.int32)]

    return bridge.run(collective, [], [tf.int32], [()], "HorovodJoin")[0]


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
