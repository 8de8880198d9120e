"""Gradients of the collectives: upstream's conventions, in every way TensorFlow differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from tests.ranks import RankPool

SIZE = 3
ROWS = [2, 0, 3]  # of each rank, where they may differ
SPLITS = [[1, 0, 1], [0, 0, 0], [0, 2, 0]]  # rank 2 keeps its last row

# How the weights that a loss gives to the outputs differ between ranks.
SCALES = np.float64([1, 10, 100])


def _input(rows: int) -> np.ndarray:
    return np.arange(2.0 * rows).reshape(rows, 2) + 1


def _weights(rank: int, rows: int) -> np.ndarray:
    return SCALES[rank] * (_input(rows) + 5)


Op = Callable[[Any], Any]


def _collective(kind: str) -> tuple[Op, int]:
    """The collective, and how many rows this rank gives to it."""
    rank = hvd.rank()
    scales = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    return {
        "allreduce average": (lambda x: hvd.allreduce(x), 4),
        "allreduce sum": (lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum"), 4),
        "allreduce scaled": (lambda x: hvd.allreduce(x, op=hvd.Sum, **scales), 4),
        "allreduce max": (lambda x: hvd.allreduce(x, op=hvd.Max), 4),
        "allgather": (lambda x: hvd.allgather(x), ROWS[rank]),
        "broadcast": (lambda x: hvd.broadcast(x, 1), 4),
        "alltoall": (lambda x: hvd.alltoall(x), 6),
        "alltoall splits": (lambda x: hvd.alltoall(x, SPLITS[rank])[0], ROWS[rank]),
        "reducescatter average": (lambda x: hvd.reducescatter(x), 7),
        "reducescatter sum": (lambda x: hvd.reducescatter(x, op=hvd.Sum), 7),
        "reducescatter scaled": (lambda x: hvd.reducescatter(x, op=hvd.Sum, **scales), 7),
    }[kind]


def _expected(kind: str, rank: int) -> np.ndarray:
    """From the weights of all ranks, which are the gradients of the outputs."""
    four = [_weights(each, 4) for each in range(SIZE)]
    if kind == "allreduce average":
        return sum(four) / SIZE
    if kind in ("allreduce sum", "allreduce scaled"):
        return sum(four) * (1.5 if "scaled" in kind else 1)
    if kind == "allreduce max":
        return np.maximum.reduce(four)
    if kind == "allgather":
        mean = sum(_weights(each, sum(ROWS)) for each in range(SIZE)) / SIZE
        first = sum(ROWS[:rank])
        return mean[first : first + ROWS[rank]]
    if kind == "broadcast":
        return sum(four) / SIZE if rank == 1 else np.zeros((4, 2))
    if kind == "alltoall":
        return np.concatenate([_weights(to, 6)[2 * rank : 2 * rank + 2] for to in range(SIZE)])
    if kind == "alltoall splits":
        parts = []
        for to in range(SIZE):
            before = sum(SPLITS[other][to] for other in range(rank))
            received = sum(SPLITS[other][to] for other in range(SIZE))
            parts.append(_weights(to, received)[before : before + SPLITS[rank][to]])
        unsent = ROWS[rank] - sum(SPLITS[rank])
        return np.concatenate([*parts, np.zeros((unsent, 2))])
    shares = [3, 2, 2]
    whole = np.concatenate([_weights(each, shares[each]) for each in range(SIZE)])
    return whole * {"average": 1, "sum": SIZE, "scaled": 1.5 * SIZE}[kind.split()[1]]


KINDS = [
    *("allreduce average", "allreduce sum", "allreduce scaled", "allreduce max"),
    *("allgather", "broadcast", "alltoall", "alltoall splits"),
    *("reducescatter average", "reducescatter sum", "reducescatter scaled"),
]


def _loss(op: Op, x: Any) -> Any:
    output = op(x)
    rows = tf.shape(output)[0]
    numbers = tf.reshape(tf.range(2 * rows), [rows, 2])
    weights = SCALES[hvd.rank()] * (tf.cast(numbers, tf.float64) + 6)
    return tf.reduce_sum(output * weights)


def _eager(op: Op, x: np.ndarray) -> np.ndarray:
    source = tf.Variable(x)
    with tf.GradientTape() as tape:
        loss = _loss(op, source)
    return tape.gradient(loss, source).numpy()


def _inside(op: Op, x: np.ndarray) -> np.ndarray:
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float64)])
    def step(source):
        with tf.GradientTape() as tape:
            tape.watch(source)
            loss = _loss(op, source)
        return tape.gradient(loss, source)

    return step(tf.constant(x)).numpy()


def _outside(op: Op, x: np.ndarray) -> np.ndarray:
    step = tf.function(lambda source: _loss(op, source))
    source = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(source)
        loss = step(source)
    return tape.gradient(loss, source).numpy()


def _session(op: Op, x: np.ndarray) -> np.ndarray:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        source = tf.compat.v1.placeholder(tf.float64, [None, 2])
        (gradient,) = tf.compat.v1.gradients(_loss(op, source), source)
        result: np.ndarray = session.run(gradient, {source: x})
        return result


WAYS = {"eager": _eager, "inside": _inside, "outside": _outside, "session": _session}


@pytest.mark.parametrize("way", WAYS)
def test_conventions(tf_pool3: RankPool, way: str):
    def gradients(way: str) -> dict[str, np.ndarray]:
        found = {}
        for kind in KINDS:
            op, rows = _collective(kind)
            found[kind] = WAYS[way](op, _input(rows))
        return found

    for rank, found in enumerate(tf_pool3.run(gradients, way)):
        for kind in KINDS:
            np.testing.assert_allclose(found[kind], _expected(kind, rank), err_msg=kind)


@pytest.mark.parametrize("way", ["eager", "function"])
def test_groups_of_several_types(tf_pool2: RankPool, way: str):
    """Integers have no gradient, an unused output's is zero, and it all goes as one group."""

    def gradients(way: str) -> list[list[Any]]:
        def step(a, n, b, c):
            found = []
            for grouped in (
                lambda *t: hvd.grouped_allreduce(t, op=hvd.Sum),
                lambda *t: hvd.grouped_allgather(t),
                lambda *t: hvd.grouped_reducescatter(t, op=hvd.Sum),
            ):
                with tf.GradientTape() as tape:
                    tape.watch([a, b, c])
                    outputs = grouped(a * 2, n, b * b, c * 3)
                    loss = tf.reduce_sum(outputs[0]) + tf.cast(
                        tf.reduce_sum(outputs[2]), tf.float32
                    )
                found.append(tape.gradient(loss, [a, b, c], unconnected_gradients="zero"))
            return found

        run = tf.function(step) if way == "function" else step
        inputs = [
            tf.constant([[1.0], [2.0]]),
            tf.constant([[7], [7]]),
            tf.constant([[3.0], [4.0]], tf.float64),
            tf.constant([[5.0], [6.0]]),
        ]
        return [[g.numpy().ravel().tolist() for g in each] for each in run(*inputs)]

    a, b, c = [2.0, 2.0], [6.0, 8.0], [0.0, 0.0]
    twice = [[4.0, 4.0], [12.0, 16.0], c]
    assert tf_pool2.run(gradients, way) == [[twice, [a, b, c], twice]] * 2


def test_second_order(tf_pool2: RankPool):
    """The gradients are collectives themselves, with gradients of their own."""

    def second() -> list[float]:
        found = []
        for op in (
            lambda x: hvd.allreduce(x * x * x, op=hvd.Sum),
            lambda x: hvd.allgather(x * x * x),
            lambda x: hvd.broadcast(x * x * x, 0),
            lambda x: hvd.alltoall(x * x * x),
            lambda x: hvd.reducescatter(x * x * x),
        ):
            x = tf.constant([2.0, 2.0])
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(op(x))
                first = inner.gradient(y, x)
            found.append(float(outer.gradient(first, x)[0]))
        return found

    # 6 x, times two for the sum; nothing where the root is somebody else
    first, other = tf_pool2.run(second)
    assert first == [24.0, 12.0, 12.0, 12.0, 12.0]
    assert other == [24.0, 12.0, 0.0, 12.0, 12.0]


def test_slices_as_gradients(tf_pool2: RankPool):
    """What is looked up in a reduced table gives IndexedSlices as its gradient."""

    def gradient() -> list[list[float]]:
        table = tf.Variable([[1.0], [2.0], [3.0]])
        with tf.GradientTape() as tape:
            rows = tf.gather(hvd.allreduce(table, op=hvd.Sum), [hvd.rank(), 2])
            loss = tf.reduce_sum(rows)
        return tape.gradient(loss, table).numpy().tolist()

    assert tf_pool2.run(gradient) == [[[1.0], [1.0], [2.0]]] * 2


def test_gradients_through_compression(tf_pool2: RankPool):
    def gradient() -> list[float]:
        x = tf.Variable([1.0, 2.0])
        with tf.GradientTape() as tape:
            y = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.bf16)
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x).numpy().tolist()

    assert tf_pool2.run(gradient) == [[2.0, 2.0]] * 2


def test_gradients_within_a_process_set(tf_pool3: RankPool):
    def gradient() -> float | None:
        pair = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[pair])
        if not pair.included():
            return None
        x = tf.Variable(1.0)
        with tf.GradientTape() as tape:
            y = hvd.allreduce(x, op=hvd.Sum, process_set=pair, name="pair")
        return float(tape.gradient(y, x))

    assert tf_pool3.run(gradient) == [2.0, None, 2.0]
