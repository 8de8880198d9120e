"""Horovod for MXNet: ``import horovod.mxnet as hvd``.

As in Horovod 0.28, there is no join, no barrier, no elastic training and no asynchronous form.
"""

from __future__ import annotations

try:
    import mxnet as _mxnet  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "horovod.mxnet needs MXNet 1.9.1 with numpy 1.23.5, which runs on x86-64 with Python 3.8 "
        f"to 3.11: pip install 'horovod[mxnet]' ({_error})"
    ) from _error

from horovod.common.reduce_op import Adasum, Max, Min, Product
from horovod.engine import shared_api as _shared_api
from horovod.engine.shared_api import *  # noqa: F403
from horovod.engine.shared_api import init, shutdown
from horovod.mxnet.allreduce_ops import (
    allreduce,
    allreduce_,
    grouped_allreduce,
    grouped_allreduce_,
)
from horovod.mxnet.compression import Compression
from horovod.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from horovod.mxnet.mpi_ops import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from horovod.mxnet.optimizer import DistributedOptimizer, DistributedTrainer

__all__ = [
    "Adasum",
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "Max",
    "Min",
    "Product",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "reducescatter",
    "shutdown",
]
__all__ += _shared_api.__all__
