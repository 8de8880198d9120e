"""Collectives in graphs: order, control flow, threads, sessions, XLA."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from tests.ranks import RankPool, run_ranks
from tests.tensorflow.conftest import tensorflow_pool

COUNT = 8


@pytest.fixture(scope="module")
def one_thread() -> Iterator[RankPool]:
    """Two ranks whose TensorFlow has a single thread for ops."""
    pools = tensorflow_pool(2)
    pool = next(pools)
    pool.run(lambda: tf.config.threading.set_inter_op_parallelism_threads(1))
    yield pool
    next(pools, None)


def test_a_v1_graph_runs_independent_collectives_in_any_order(one_thread: RankPool):
    def run() -> list[list[float]]:
        order = range(COUNT) if hvd.rank() == 0 else reversed(range(COUNT))
        config = tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
        )
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            x = tf.compat.v1.placeholder(tf.float32, [2])
            reduced = {i: hvd.allreduce(x * i, op=hvd.Sum, name=f"tensor {i}") for i in order}
            outputs = [reduced[i] for i in range(COUNT)]
            gradients = tf.compat.v1.gradients(tf.add_n(outputs), x)
            for _ in range(3):
                values = session.run(outputs, {x: [1.0, 2.0]})
            return [*[v.tolist() for v in values], session.run(gradients, {x: [1, 1]})[0].tolist()]

    total = 2.0 * sum(range(COUNT))
    expected = [[2.0 * i, 4.0 * i] for i in range(COUNT)]
    assert one_thread.run(run) == [[*expected, [total, total]]] * 2


def test_functions_of_several_threads(one_thread: RankPool):
    def run() -> dict[int, float]:
        results: dict[int, float] = {}

        def train(number: int) -> None:
            @tf.function
            def step(x):
                return hvd.allreduce(x, op=hvd.Sum, name=f"thread {number}")

            for _ in range(3):
                results[number] = float(step(tf.constant(float(number))))

        threads = [threading.Thread(target=train, args=(number,)) for number in range(5)]
        for thread in threads if hvd.rank() == 0 else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        return dict(sorted(results.items()))

    assert one_thread.run(run) == [{number: 2.0 * number for number in range(5)}] * 2


def test_a_function_runs_collectives_in_the_order_of_the_program(one_thread: RankPool):
    """Whatever they depend on: the first to be ready is not the first to run on all ranks."""

    def run() -> list[float]:
        @tf.function
        def step(x):
            slow = tf.linalg.trace(tf.linalg.matmul(x, x)) if hvd.rank() == 0 else x[0, 0]
            first = hvd.allreduce(slow * 0 + 1, op=hvd.Sum)
            second = hvd.allreduce(x[0, 0] * 0 + 2, op=hvd.Sum)
            unused = hvd.allreduce(x[0, 0] * 0 + 3, op=hvd.Sum)
            third = hvd.allreduce(x[0, 0] * 0 + 4, op=hvd.Sum)
            del unused  # it still runs, on every rank
            return [first, second, third]

        for _ in range(5):
            results = step(tf.ones([200, 200]))
        return [float(result) for result in results]

    assert one_thread.run(run) == [[2.0, 4.0, 8.0]] * 2


def test_errors_need_no_thread_of_tensorflows(one_thread: RankPool):
    """The only one is in the op that fails."""

    def run() -> float:
        @tf.function
        def step(x):
            product = tf.linalg.matmul(x, x)
            return hvd.allreduce(product[hvd.rank() :]) + 1.0, tf.linalg.matmul(product, product)

        for _ in range(3):
            with pytest.raises(tf.errors.FailedPreconditionError, match="mismatched shape"):
                step(tf.ones([50, 50]))
        return float(hvd.allreduce(1.0, op=hvd.Sum))

    assert one_thread.run(run) == [2.0, 2.0]


def test_control_flow(tf_pool2: RankPool):
    def run() -> list[float]:
        @tf.function
        def step(x, flag):
            if flag:  # AutoGraph makes a tf.cond of it, and a tf.while_loop of the loop
                x = hvd.allreduce(x, op=hvd.Sum)
            for _ in tf.range(3):
                x = hvd.allreduce(x + 1.0, op=hvd.Sum)
            return x

        one = tf.constant(1.0)
        return [float(step(one, tf.constant(True))), float(step(one, tf.constant(False)))]

    # ((2 + 1) * 2 + 1) * 2 + 1) * 2, and the same from 1
    assert tf_pool2.run(run) == [[30.0, 22.0]] * 2


def test_nested_functions_and_map(tf_pool2: RankPool):
    def run() -> list[list[float]]:
        @tf.function
        def inner(x):
            return hvd.allreduce(x, op=hvd.Sum, name="inner")

        @tf.function
        def outer(x):
            return inner(inner(x) + 1.0)

        mapped = tf.map_fn(inner, tf.constant([[1.0], [2.0]]), parallel_iterations=1)
        return [outer(tf.constant([1.0])).numpy().tolist(), mapped.numpy().ravel().tolist()]

    assert tf_pool2.run(run) == [[[6.0], [2.0, 4.0]]] * 2


def test_eager_tensors_and_variables_from_outside(tf_pool2: RankPool):
    def run() -> list[float]:
        for _ in range(hvd.rank()):  # from now on the ranks number their tensors differently
            tf.ones(1)
        constant, variable = tf.constant(1.0), tf.Variable(2.0)
        inner = tf.function(lambda: hvd.allreduce(constant, op=hvd.Sum))

        @tf.function
        def step():
            with tf.name_scope("scope"):
                variable.assign_add(hvd.allreduce(constant, op=hvd.Sum) + inner() - inner())
            return hvd.allreduce(variable), *hvd.grouped_allreduce([constant, variable])

        return [float(result) for result in (*step(), *step())]

    assert tf_pool2.run(run) == [[4.0, 1.0, 4.0, 6.0, 1.0, 6.0]] * 2


def test_an_eager_tensor_in_a_v1_graph(tf_pool2: RankPool):
    def refuse() -> float:
        tensor = tf.constant(1.0)
        graph, refused = tf.Graph(), pytest.raises(tf.errors.InvalidArgumentError, match="capture")
        with graph.as_default(), refused:
            hvd.allreduce(tensor)
        return float(hvd.allreduce(tensor, op=hvd.Sum))

    assert tf_pool2.run(refuse) == [2.0, 2.0]


def test_functions_run_eagerly(tf_pool2: RankPool):
    def run() -> float:
        tf.config.run_functions_eagerly(True)
        try:
            return float(tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.constant(3.0)))
        finally:
            tf.config.run_functions_eagerly(False)

    assert tf_pool2.run(run) == [6.0, 6.0]


def test_a_retraced_function(tf_pool2: RankPool):
    def run() -> list[float]:
        step = tf.function(lambda x: tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum)))
        return [float(step(tf.ones([n]))) for n in (1, 2, 3, 2)]

    assert tf_pool2.run(run) == [[2.0, 4.0, 6.0, 4.0]] * 2


def test_constants_in_a_v1_graph_are_reduced_every_time(tf_pool2: RankPool):
    """TensorFlow folds constants; the values of other ranks are none."""

    def run() -> list[float]:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            reduced = hvd.allreduce(tf.constant(1.0), op=hvd.Sum)
            return [float(session.run(reduced)) for _ in range(3)]

    assert tf_pool2.run(run) == [[2.0, 2.0, 2.0]] * 2


def test_xla_is_told_what_to_set(tf_pool2: RankPool):
    def run() -> tuple[list[str], float]:
        texts = []

        @tf.function(jit_compile=True)
        def compiled(x):
            return hvd.allreduce(x)

        @tf.function(jit_compile=True)
        def outer(x):
            return tf.function(lambda y: hvd.broadcast(y, 0))(x)

        for function in (compiled, outer):
            with pytest.raises(tf.errors.InvalidArgumentError) as caught:
                function(tf.constant(1.0))
            texts.append(caught.value.message)
        return texts, float(hvd.allreduce(1.0, op=hvd.Sum))

    for texts, total in tf_pool2.run(run):
        assert all("jit_compile=False" in text and "XLA" in text for text in texts)
        assert total == 2.0


def test_a_dataset_may_call_collectives(tf_pool2: RankPool):
    def run() -> list[float]:
        dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0])
        reduced = dataset.map(lambda x: hvd.allreduce(x, op=hvd.Sum, name="item"))
        return [float(x) for x in reduced]

    assert tf_pool2.run(run) == [[2.0, 4.0, 6.0]] * 2


def _without_eager_execution(rank: int, size: int) -> list[float]:
    tf.compat.v1.disable_eager_execution()
    hvd.init()
    x = tf.compat.v1.placeholder(tf.float32, [2])
    weights = tf.compat.v1.get_variable("w", initializer=[1.0, 2.0], use_resource=False)
    reduced = hvd.allreduce(x * weights, op=hvd.Sum)
    (gradient,) = tf.compat.v1.gradients(reduced, weights)
    gathered = hvd.allgather(weights + rank)
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        values = session.run([reduced, gradient, gathered], {x: np.float32([1, rank])})
        with pytest.raises(tf.errors.FailedPreconditionError, match="mismatched shape"):
            session.run(hvd.allreduce(weights[rank:], name="different"))
    return [float(number) for value in values for number in value]


def test_without_eager_execution():
    first, second = run_ranks(_without_eager_execution, 2)
    assert first[:2] == second[:2] == [2.0, 2.0]  # 1 + 1, and 0 * 2 + 1 * 2
    assert first[2:4] == [2.0, 0.0]
    assert second[2:4] == [2.0, 2.0]
    assert first[4:] == second[4:] == [1.0, 2.0, 2.0, 3.0]


def _reinitialised(rank: int, size: int) -> list[float]:
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="step"))
    results = []
    for _ in range(3):
        hvd.init()
        results.append(float(step(tf.constant(1.0))))
        hvd.shutdown()
        with pytest.raises(tf.errors.FailedPreconditionError, match="not initialised"):
            step(tf.constant(1.0))
    return results


def test_a_graph_outlives_shutdown_and_init():
    assert run_ranks(_reinitialised, 2) == [[2.0] * 3] * 2


def _traced_before_init(rank: int, size: int) -> list[list[float]]:
    @tf.function(input_signature=[tf.TensorSpec([6], tf.float32)])
    def step(x):
        slices = tf.IndexedSlices(x[:1], tf.constant([0]))
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            sent = hvd.broadcast(x, 1)
            share = hvd.reducescatter(x, op=hvd.Sum)
        return [
            hvd.allreduce(slices).values,
            tape.gradient(sent, x)[:1],
            tape.gradient(share, x)[:1],
            tf.cast(hvd.size_op(), tf.float32)[tf.newaxis],
        ]

    step.get_concrete_function()
    hvd.init()
    return [result.numpy().tolist() for result in step(tf.fill([6], 3.0))]


@pytest.mark.parametrize("size", [2, 3])
def test_sizes_and_ranks_are_those_of_the_run(size: int):
    """As in an elastic job, where they change: a graph that knew none when it was made."""
    for rank, results in enumerate(run_ranks(_traced_before_init, size)):
        shares = [pytest.approx(3.0 / size)] * size
        assert results == [shares, [1.0 if rank == 1 else 0.0], [float(size)], [float(size)]]
