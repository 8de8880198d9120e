"""The job's sizes and ranks as int32 scalars that a graph reads each time it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet
from horovod.common.topology import Topology
from horovod.engine import arguments
from horovod.engine.job import WORLD
from horovod.engine.runtime import runtime
from horovod.tensorflow import bridge

_NOT_INITIALISED = -1
_UNKNOWN_SET = -3


@bridge.unconverted
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks of the process set `process_set_id`, read when the op `name` runs."""
    if not tf.executing_eagerly() and _is_fixed():
        runtime.process_set_ranks(process_set_id)  # a ValueError while the graph is built

    def size() -> int:
        runtime.group(WORLD)  # says why not, as the collectives do, if it is not initialised
        return len(runtime.process_set_ranks(process_set_id))

    return _scalar(size, name or "HorovodSize")


@bridge.unconverted
def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host, read when the op `name` runs."""
    return _scalar(lambda: _topology().local_size, name or "HorovodLocalSize")


@bridge.unconverted
def rank_op(name: str | None = None) -> tf.Tensor:
    """This process's rank, read when the op `name` runs."""
    return _scalar(lambda: _topology().rank, name or "HorovodRank")


@bridge.unconverted
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process's rank on its host, read when the op `name` runs."""
    return _scalar(lambda: _topology().local_rank, name or "HorovodLocalRank")


@bridge.unconverted
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this process belongs to the set `process_set_id`, 0 if not, read when the op `name`
    runs.

    -1 where Horovod is not initialised, -3 where there is no such set.
    """

    def included() -> int:
        if not runtime.is_initialized():
            return _NOT_INITIALISED
        ranks = runtime.process_set_ids_and_ranks().get(process_set_id)
        if ranks is None:
            return _UNKNOWN_SET
        return int(runtime.topology.rank in ranks)

    return _scalar(included, name or "HorovodProcessSetIncluded")


def set_size(process_set: ProcessSet) -> Any:
    """The number of ranks of a set: a number now, or one that the graph reads when it runs."""
    if _is_fixed():
        return arguments.set_size(process_set)
    return _scalar(lambda: arguments.set_size(process_set), "HorovodSize")


def own_rank() -> Any:
    """This process's rank: a number now, or one that the graph reads when it runs."""
    return runtime.topology.rank if _is_fixed() else rank_op()


def _is_fixed() -> bool:
    """Whether ranks and sizes of now still hold when what we build now is run."""
    return tf.executing_eagerly() or (runtime.is_initialized() and not runtime.is_elastic())


def _scalar(value: Callable[[], int], name: str) -> tf.Tensor:
    def read(_: list[torch.Tensor], __: str | None) -> list[torch.Tensor]:
        return [torch.tensor(value(), dtype=torch.int32)]

    return bridge.run(read, [], [tf.int32], [()], name)[0]


def _topology() -> Topology:
    runtime.group(WORLD)  # says why not, as the collectives do, if it is not initialised
    return runtime.topology
