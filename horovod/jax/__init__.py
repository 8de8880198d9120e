"""Horovod for JAX: ``import horovod.jax as hvd``."""

from __future__ import annotations

import importlib
import typing

from horovod.jax import versions as _versions  # first: says if JAX is missing or too old

_versions.check()

from horovod.common.exceptions import HorovodInternalError  # noqa: E402
from horovod.common.local_steps import OuterSGD  # noqa: E402
from horovod.common.reduce_op import Adasum, Max, Min, Product  # noqa: E402
from horovod.engine import shared_api as _shared_api  # noqa: E402
from horovod.engine.shared_api import *  # noqa: E402, F403
from horovod.engine.shared_api import is_homogeneous  # noqa: E402
from horovod.jax.basics import barrier, init, join, shutdown  # noqa: E402
from horovod.jax.compression import Compression  # noqa: E402
from horovod.jax.exchange import alltoall, alltoall_async  # noqa: E402
from horovod.jax.functions import (  # noqa: E402
    allgather_object,
    broadcast_object,
    broadcast_parameters,
)
from horovod.jax.movements import (  # noqa: E402
    allgather,
    allgather_async,
    broadcast,
    broadcast_async,
    grouped_allgather,
    grouped_allgather_async,
)
from horovod.jax.optimizer import DistributedOptimizer, grad, value_and_grad  # noqa: E402
from horovod.jax.reductions import (  # noqa: E402
    allreduce,
    allreduce_async,
    average_metrics,
    grouped_allreduce,
    grouped_allreduce_async,
)
from horovod.jax.scattering import (  # noqa: E402
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horovod.torch.ops.handles import poll, synchronize  # noqa: E402

__all__ = [
    "Adasum",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "OuterSGD",
    "Product",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_parameters",
    "grad",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "synchronize",
    "value_and_grad",
]
__all__ += _shared_api.__all__

if typing.TYPE_CHECKING:
    from horovod.jax import elastic as elastic
    from horovod.jax import linen as linen
    from horovod.jax import nnx as nnx


def __getattr__(name: str) -> typing.Any:
    """Import ``hvd.elastic``, and ``hvd.linen`` and ``hvd.nnx`` (which need flax), on first use."""
    if name in ("elastic", "linen", "nnx"):
        return importlib.import_module(f"horovod.jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
