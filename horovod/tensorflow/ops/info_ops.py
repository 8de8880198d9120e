"""Ops that return the job's sizes and ranks as int32 scalars, each time that a graph runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet
from horovod.common.topology import Topology
from horovod.engine import arguments
from horovod.engine.collective import WORLD
from horovod.engine.runtime import runtime
from horovod.tensorflow.ops import bridge

_NOT_INITIALISED = -1
_UNKNOWN_SET = -3


@bridge.without_autograph
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of a process set, which a graph reads each time it runs.

    Args:
        process_set_id: Number of the process set; 0 (the default) stands for all ranks.
        name: Name of the op in a graph.

    Returns:
        An int32 scalar.
    """
    if not tf.executing_eagerly() and _is_fixed():
        runtime.process_set_ranks(process_set_id)  # a ValueError while the graph is built

    def size() -> int:
        runtime.group(WORLD)  # raises the collectives' error if Horovod is not initialised
        return len(runtime.process_set_ranks(process_set_id))

    return _scalar(size, name or "HorovodSize")


@bridge.without_autograph
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host, which a graph reads each time it runs.

    Args:
        name: Name of the op in a graph.

    Returns:
        An int32 scalar.
    """
    return _scalar(lambda: _topology().local_size, name or "HorovodLocalSize")


@bridge.without_autograph
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank, which a graph reads each time it runs.

    Args:
        name: Name of the op in a graph.

    Returns:
        An int32 scalar.
    """
    return _scalar(lambda: _topology().rank, name or "HorovodRank")


@bridge.without_autograph
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank on its host, which a graph reads each time it runs.

    Args:
        name: Name of the op in a graph.

    Returns:
        An int32 scalar.
    """
    return _scalar(lambda: _topology().local_rank, name or "HorovodLocalRank")


@bridge.without_autograph
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return whether this process belongs to a process set; a graph reads it each time it runs.

    Args:
        process_set_id: Number of the process set; 0 (the default) stands for all ranks.
        name: Name of the op in a graph.

    Returns:
        An int32 scalar: 1 if this process belongs to the set and 0 if not, -1 if Horovod is not
        initialised, -3 if there is no such set.
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
    """Return the number of ranks of a set: a number, or an op that reads it when the graph runs."""
    if _is_fixed():
        return arguments.set_size(process_set)
    return _scalar(lambda: arguments.set_size(process_set), "HorovodSize")


def own_rank() -> Any:
    """Return this process's rank: a number, or an op that reads it when the graph runs."""
    return runtime.topology.rank if _is_fixed() else rank_op()


def _is_fixed() -> bool:
    """Return whether the present ranks and sizes still hold when the present graph runs."""
    return tf.executing_eagerly() or (runtime.is_initialized() and not runtime.is_elastic())


def _scalar(value: Callable[[], int], name: str) -> tf.Tensor:
    """Return a tensor with the value, in a graph an op that asks for it each time."""

    def read(_: list[torch.Tensor], __: str | None) -> list[torch.Tensor]:
        return [torch.tensor(value(), dtype=torch.int32)]

    return bridge.run(read, [], [bridge.INT32_SCALAR], name)[0]


def _topology() -> Topology:
    runtime.group(WORLD)  # raises the collectives' error if Horovod is not initialised
    return runtime.topology
