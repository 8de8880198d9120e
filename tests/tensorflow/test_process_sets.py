"""Process sets: what a collective within one does, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from tests.ranks import run_ranks


def _within(rank: int, size: int) -> list[dict[str, Any]]:
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet([1])
    hvd.init(process_sets=[even, odd])
    mine, other = (even, odd) if rank % 2 == 0 else (odd, even)

    def step(value: tf.Tensor) -> dict[str, tf.Tensor]:
        slices = tf.IndexedSlices(value, tf.constant([rank]))
        rows = tf.repeat(value, mine.size())
        return {
            "sum": hvd.allreduce(value, op=hvd.Sum, process_set=mine),
            "average": hvd.allreduce(value, process_set=mine),
            "group": hvd.grouped_allreduce([value], process_set=mine)[0],
            "slices": hvd.allreduce(slices, process_set=mine).values,
            "gathered": hvd.allgather(value, process_set=mine),
            "root": hvd.broadcast(value, mine.ranks[-1], process_set=mine),
            "swapped": hvd.alltoall(rows, process_set=mine),
            "scattered": hvd.reducescatter(rows, op=hvd.Sum, process_set=mine),
            "size": hvd.size_op(mine.process_set_id),
            "included": hvd.process_set_included_op(mine.process_set_id),
            "excluded": hvd.process_set_included_op(other.process_set_id),
        }

    value = tf.constant([float(rank)])
    seen = [
        {name: result.numpy().tolist() for name, result in run(value).items()}
        for run in (step, tf.function(step))
    ]
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not belong"):
        hvd.allreduce(1.0, process_set=other)
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not belong"):
        tf.function(lambda: hvd.broadcast(1.0, other.ranks[0], process_set=other))()
    with pytest.raises(tf.errors.InvalidArgumentError, match="root"):
        hvd.broadcast(1.0, other.ranks[0], process_set=mine)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no process set 7"):
        hvd.size_op(7)
    with pytest.raises(NotImplementedError, match="global"):
        hvd.allreduce(1.0, op=hvd.Adasum, process_set=mine)
    return seen


def test_collectives_within_sets():
    for rank, seen in enumerate(run_ranks(_within, 3)):
        members = [0.0, 2.0] if rank % 2 == 0 else [1.0]
        total = sum(members)
        for each in seen:
            assert each == {
                "sum": [total],
                "average": [total / len(members)],
                "group": [total / len(members)],
                "slices": [member / len(members) for member in members],
                "gathered": members,
                "root": members[-1:],
                "swapped": members,
                "scattered": [total],
                "size": len(members),
                "included": 1,
                "excluded": 0,
            }


COLLECTIVES = {
    "allreduce": lambda x, s: hvd.allreduce(x, process_set=s),
    "slices": lambda x, s: hvd.allreduce(tf.IndexedSlices(x, tf.constant([0, 1])), process_set=s),
    "grouped_allreduce": lambda x, s: hvd.grouped_allreduce([x], process_set=s),
    "allgather": lambda x, s: hvd.allgather(x, process_set=s),
    "grouped_allgather": lambda x, s: hvd.grouped_allgather([x], process_set=s),
    "broadcast": lambda x, s: hvd.broadcast(x, 0, process_set=s),
    "alltoall": lambda x, s: hvd.alltoall(x, process_set=s),
    "reducescatter": lambda x, s: hvd.reducescatter(x, process_set=s),
    "grouped_reducescatter": lambda x, s: hvd.grouped_reducescatter([x], process_set=s),
}


def _unknown_in_a_graph(rank: int, size: int) -> float:
    hvd.init()
    unknown = hvd.ProcessSet([0])
    for collective in COLLECTIVES.values():
        built = tf.function(lambda x, each=collective: each(x, unknown))
        with pytest.raises(ValueError, match="not registered"):
            built.get_concrete_function(tf.TensorSpec([2], tf.float32))
        with (
            tf.Graph().as_default(),
            pytest.raises(ValueError, match="not registered"),
        ):
            collective(tf.compat.v1.placeholder(tf.float32, [2]), unknown)
    with pytest.raises(ValueError, match="no process set 7"):
        tf.function(lambda: hvd.size_op(7)).get_concrete_function()
    return float(hvd.allreduce(1.0, op=hvd.Sum))


def test_an_unknown_set_is_refused_while_a_graph_is_built():
    assert run_ranks(_unknown_in_a_graph, 2) == [2.0, 2.0]


def _dynamic(rank: int, size: int) -> list[Any]:
    hvd.init(process_sets="dynamic")
    pair = hvd.add_process_set([0, 2])
    step = tf.function(lambda: hvd.allreduce(1.0, op=hvd.Sum, process_set=pair, name="pair"))
    seen: list[Any] = [str(pair)]
    if pair.included():
        seen.append(float(step()))
    assert hvd.remove_process_set(pair)
    # Rank 1 has not built the graph so far.
    error = tf.errors.InvalidArgumentError if pair.included() else ValueError
    with pytest.raises(error, match="not registered"):
        step()
    # The graph finds the set again under whatever number it has now.
    hvd.add_process_set([1])
    hvd.add_process_set(pair)
    if pair.included():
        seen.append(float(step()))
    return [*seen, str(pair)]


def test_a_graph_follows_its_set():
    first = "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)"
    second = "ProcessSet(process_set_id=2, ranks=[0, 2], mpi_comm=None)"
    member = [first, 2.0, 2.0, second]
    assert run_ranks(_dynamic, 3) == [member, [first, second], member]
