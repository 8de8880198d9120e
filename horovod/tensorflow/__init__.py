"""Horovod for TensorFlow: ``import horovod.tensorflow as hvd``."""

from __future__ import annotations

import importlib
import typing

from horovod.common.util import check_num_rank_power_of_2, split_list
from horovod.common.util import resolve_reduce_op as handle_average_backwards_compatibility
from horovod.engine.shared_api import *  # noqa: F403
from horovod.tensorflow import mpi_ops as _mpi_ops
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.gradient_tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from horovod.tensorflow.mpi_ops import *  # noqa: F403
from horovod.tensorflow.optimizer import DistributedOptimizer
from horovod.tensorflow.util import (
    _executing_eagerly,  # noqa: F401 (scripts import it)
    check_extension,
    gpu_available,
    refs_to_vars,
    vars_to_refs,
)

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_extension",
    "check_num_rank_power_of_2",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "refs_to_vars",
    "split_list",
    "vars_to_refs",
]
__all__ += _mpi_ops.__all__

if typing.TYPE_CHECKING:
    from horovod.tensorflow import elastic as elastic
    from horovod.tensorflow import keras as keras
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization


def __getattr__(name: str) -> typing.Any:
    """Import the parts that need Keras when a script first asks for them."""
    if name in ("elastic", "keras"):
        return importlib.import_module(f"horovod.tensorflow.{name}")
    if name == "SyncBatchNormalization":
        from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
