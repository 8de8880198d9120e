"""Elastic training with PyTorch: ``hvd.elastic.run``, `TorchState` and `ElasticSampler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from horovod.common.elastic import State, run_fn
from horovod.elastic.worker import this_worker
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import init, shutdown
from horovod.torch.optimizers.reducing import restart_optimizers

__all__ = ["ElasticSampler", "TorchState", "run"]

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate the training function `func`, whose first argument is the state.

    It is called again with the state of the last commit when a rank is lost, and with the present
    state when ranks come or go. Collectives belong inside of it: a rank that joins later begins
    there. Without an elastic launcher it is a plain call.

    Examples:
        >>> @hvd.elastic.run
        ... def train(state): ...
    """
    return run_fn(func, _reset, this_worker)


def _reset() -> None:
    shutdown()
    init()
    restart_optimizers()
