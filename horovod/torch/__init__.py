"""Horovod for PyTorch: ``import horovod.torch as hvd``."""

from __future__ import annotations

import importlib
import typing

from horovod.common.exceptions import HorovodInternalError
from horovod.common.local_steps import OuterSGD
from horovod.engine.shared_api import *  # noqa: F403
from horovod.lightning import registration as _lightning
from horovod.torch import mpi_ops as _mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horovod.torch.mpi_ops import *  # noqa: F403
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "OuterSGD",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
__all__ += _mpi_ops.__all__

_lightning.install()  # Trainer(strategy="horovod"), where there is Lightning

if typing.TYPE_CHECKING:
    from horovod.torch import elastic as elastic
    from horovod.torch import hooks as hooks
    from horovod.torch.graphs import graphed as graphed


def __getattr__(name: str) -> typing.Any:
    """Import `elastic`, `hooks` or `graphed` when a script first asks for it: few do."""
    if name in ("elastic", "hooks"):
        return importlib.import_module(f"horovod.torch.{name}")
    if name == "graphed":
        return importlib.import_module("horovod.torch.graphs").graphed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
