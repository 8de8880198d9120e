"""TF tensors as torch tensors and back, and Python in graphs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

import horovod.tensorflow as hvd
from horovod.tensorflow.ops import bridge, python_op
from tests.ranks import RankPool, run_ranks

# These run in a rank: TensorFlow's threads stay out of the test process.


def _on_one(pool: RankPool, function: Any, *arguments: Any) -> Any:
    results = pool.run(function, *arguments)
    assert results[0] == results[1]
    return results[0]


def test_memory_is_shared_both_ways(tf_pool2: RankPool):
    def share() -> list[bool]:
        tensor = tf.random.normal([1000])
        view = bridge.to_torch(tensor)
        again = bridge.to_torch(tensor)
        result = torch.randn(1000)
        taken = bridge.to_tensorflow(result)
        return [
            view.data_ptr() == again.data_ptr(),
            view.numpy().tobytes() == tensor.numpy().tobytes(),
            bridge.to_torch(taken).data_ptr() == result.data_ptr(),
        ]

    assert _on_one(tf_pool2, share) == [True] * 3


def test_memory_that_tensorflow_could_not_compute_on_is_copied(tf_pool2: RankPool):
    def compute() -> list[Any]:
        base = torch.arange(24.0)
        views = [base[1:9], base[3:].view(3, 7)[:2], base.view(4, 6).t(), base[::2], base[:0]]
        # TensorFlow aborts the process if it computes on memory that is not aligned.
        sums = [float(tf.reduce_sum(bridge.to_tensorflow(view))) for view in views]
        return [sums, [float(view.sum()) for view in views]]

    sums, expected = _on_one(tf_pool2, compute)
    assert sums == expected


def test_a_result_may_be_changed_by_tensorflow_and_the_input_stays(tf_pool2: RankPool):
    """TensorFlow reuses the buffer of a temporary; it must not be the input's."""

    def change() -> list[list[float]]:
        inputs = [tf.constant([[1.0, 2.0], [3.0, 4.0]]) for _ in range(4)]

        @tf.function
        def step(a, b, c, d):
            return (
                hvd.allreduce(a) * 3 + 1,
                hvd.allgather(b) * 3 + 1,
                hvd.broadcast(c, 0) * 3 + 1,
                hvd.alltoall(d) * 3 + 1,
            )

        step(*inputs)
        return [each.numpy().ravel().tolist() for each in inputs]

    assert _on_one(tf_pool2, change) == [[1.0, 2.0, 3.0, 4.0]] * 4


def _alone(rank: int, size: int) -> list[list[float]]:
    """A job of one rank has nobody to exchange anything with: still no result is an input."""
    hvd.init()
    inputs = [tf.constant([[1.0, 2.0], [3.0, 4.0]]) for _ in range(5)]

    @tf.function
    def step(a, b, c, d, e):
        return (
            hvd.allreduce(a) * 3 + 1,
            hvd.allgather(b) * 3 + 1,
            hvd.broadcast(c, 0) * 3 + 1,
            hvd.alltoall(d) * 3 + 1,
            hvd.reducescatter(e) * 3 + 1,
        )

    step(*inputs)
    return [each.numpy().ravel().tolist() for each in inputs]


def test_alone():
    assert run_ranks(_alone, 1) == [[[1.0, 2.0, 3.0, 4.0]] * 5]


@pytest.mark.parametrize("with_thread", [False, True])
def test_a_graph_op_keeps_nothing_alive_after_it_ran(tf_pool2: RankPool, with_thread: bool):
    def leftovers(with_thread: bool) -> list[bool]:
        seen: list[Any] = []

        def function(tensors: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
            results = [tensor * 2 for tensor in tensors]
            seen.extend(weakref.ref(tensor) for tensor in (*tensors, *results))
            return results

        def step(x):
            return bridge.run(function, [x + 1], [tf.TensorSpec(x.shape, tf.float32)])

        if with_thread:  # v1 graphs and functions of other threads
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                session.run(step(tf.ones([3])))
        else:
            compiled = tf.function(step)
            with tf.GradientTape() as tape:
                x = tf.ones([3])
                tape.watch(x)
                compiled(x)
        gc.collect()
        return [reference() is None for reference in seen]

    assert _on_one(tf_pool2, leftovers, with_thread) == [True, True]


def test_without_tensorflows_internals(tf_pool2: RankPool):
    def reduce() -> list[float]:
        known, python_op._py_funcs = python_op._py_funcs, None
        try:

            @tf.function
            def step(x):
                return hvd.allreduce(x, op=hvd.Sum)

            return step(tf.constant([1.0, 2.0])).numpy().tolist()
        finally:
            python_op._py_funcs = known

    assert _on_one(tf_pool2, reduce) == [2.0, 4.0]


def test_static_shapes(tf_pool2: RankPool):
    def shapes() -> list[Any]:
        found: list[Any] = []

        @tf.function(
            input_signature=[
                tf.TensorSpec([4, 3], tf.float32),
                tf.TensorSpec([None, 3], tf.float32),
                tf.TensorSpec(None, tf.float32),
            ]
        )
        def step(*tensors):
            for tensor in tensors:
                outputs = [
                    hvd.allreduce(tensor),
                    *hvd.grouped_allreduce([tensor]),
                    hvd.broadcast(tensor, 0),
                    hvd.allgather(tensor),
                    hvd.alltoall(tensor),
                    *hvd.alltoall(tensor, tf.shape(tensor)[:1] // 2),
                    hvd.reducescatter(tensor),
                ]
                known = [
                    out.shape.as_list() if out.shape.rank is not None else None for out in outputs
                ]
                found.append(known)
            return [hvd.rank_op().shape.as_list(), hvd.size_op().shape.as_list()]

        step.get_concrete_function()
        return found

    same, moved, splits = [4, 3], [None, 3], [None]
    assert _on_one(tf_pool2, shapes) == [
        [same, same, same, moved, moved, moved, splits, moved],
        [moved, moved, moved, moved, moved, moved, splits, moved],
        [None, None, None, None, None, None, splits, None],
    ]


def test_the_ranks_know_an_op_by_its_name_in_the_graph(tf_pool2: RankPool):
    """Each rank runs it in its own way: if the names were not the same they would wait forever."""

    def meet() -> list[float]:
        if hvd.rank() == 0:
            return [
                float(hvd.allreduce(1.0, op=hvd.Sum, name="given")),
                float(hvd.allreduce(1.0, op=hvd.Sum, name="scope/given")),
                float(hvd.allreduce(1.0, op=hvd.Sum, name="given_1")),
                float(hvd.allreduce(1.0, op=hvd.Sum, name="HorovodAllreduce_scope_x_0")),
                float(hvd.allreduce(1.0, op=hvd.Sum, name="scope_1/HorovodAllreduce_scope_x_0")),
                float(hvd.allreduce(1.0, op=hvd.Sum, name="a_b_0")),
            ]

        @tf.function
        def step():
            results = [hvd.allreduce(1.0, op=hvd.Sum, name="given")]
            with tf.name_scope("scope"):
                results += [hvd.allreduce(1.0, op=hvd.Sum, name="given")]
                x = tf.identity(1.0, name="x")
            results += [hvd.allreduce(1.0, op=hvd.Sum, name="given")]
            with tf.name_scope("other"):
                results += [hvd.allreduce(x, op=hvd.Sum, ignore_name_scope=True)]
            with tf.name_scope("scope"):
                results += [hvd.allreduce(x, op=hvd.Sum)]
            return [*results, hvd.allreduce(1.0, op=hvd.Sum, name="a b:0")]

        return [float(result) for result in step()]

    assert tf_pool2.run(meet) == [[2.0] * 6] * 2


def test_messages_name_the_line_of_the_script(tf_pool2: RankPool):
    def lines() -> list[str]:
        texts = []
        for number, run in enumerate([lambda step: step(), lambda step: tf.function(step)()]):

            def step(number=number):
                shape = [hvd.rank() + 1]
                return hvd.allreduce(tf.ones(shape), name=f"line {number}")  # this line

            with pytest.raises(tf.errors.OpError) as caught:
                run(step)
            texts.append(caught.value.message)
        return texts

    with open(__file__) as file:
        line = 1 + next(i for i, text in enumerate(file) if text.endswith("# this line\n"))
    for texts in tf_pool2.run(lines):
        assert all(f"test_bridge.py:{line}" in text for text in texts)


def test_types_that_no_one_can_send(tf_pool2: RankPool):
    def refuse() -> list[str]:
        texts = []
        for value in (tf.constant(["text"]), tf.zeros([1], tf.qint8), object()):
            for collective in (hvd.allreduce, hvd.allgather, lambda v: hvd.broadcast(v, 0)):
                with pytest.raises(tf.errors.InvalidArgumentError) as caught:
                    collective(value)
                texts.append(str(caught.value))
        return texts

    for texts in tf_pool2.run(refuse):
        assert len(texts) == 9
        assert all("string" in text for text in texts[:3])
        assert all("qint8" in text for text in texts[3:6])


def test_info_ops_are_read_when_the_graph_runs(tf_pool3: RankPool):
    def read() -> list[list[int]]:
        def step():
            return [
                hvd.rank_op(),
                hvd.size_op(),
                hvd.size_op(process_set_id=0),
                hvd.local_rank_op(),
                hvd.local_size_op(),
                hvd.process_set_included_op(),
                hvd.process_set_included_op(99),
            ]

        compiled = tf.function(step)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            in_session = [int(value) for value in session.run(step())]
        values = [step(), compiled()]
        assert all(value.dtype == tf.int32 and value.shape == () for v in values for value in v)
        return [in_session, *([int(value) for value in v] for v in values)]

    for rank, found in enumerate(tf_pool3.run(read)):
        assert found == [[rank, 3, 3, rank, 3, 1, -3]] * 3


def test_numpy_results_have_the_type_of_the_input(tf_pool2: RankPool):
    def types() -> list[str]:
        return [
            str(hvd.allreduce(np.ones(2, dtype)).dtype.name)
            for dtype in (np.uint8, np.int64, np.float16, np.complex64)
        ]

    assert _on_one(tf_pool2, types) == ["uint8", "int64", "float16", "complex64"]
