"""Training with a tape: ranks stay equal, and learn what one process learns from all the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from tests.ranks import RankPool

STEPS = 6
BATCH = 8  # rows of one rank


def _data(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, words and labels of all steps and ranks."""
    random = np.random.default_rng(3)
    features = random.normal(size=(STEPS, size, BATCH, 5)).astype(np.float32)
    words = random.integers(0, 11, (STEPS, size, BATCH, 3))
    labels = features.sum(-1, keepdims=True) + words.sum(-1, keepdims=True) * 0.1
    return features, words, labels.astype(np.float32)


class _Model:
    """Dense layers beside an embedding, whose gradient is sparse, and a variable without one."""

    def __init__(self, seed: int) -> None:
        tf.keras.utils.set_random_seed(seed)
        self.embedding = tf.Variable(tf.random.normal([11, 4], stddev=0.3), name="words")
        self.hidden = tf.keras.layers.Dense(7, activation="tanh")
        self.out = tf.keras.layers.Dense(1)
        self.unused = tf.Variable(1.0, name="unused")
        self.hidden.build((None, 9))
        self.out.build((None, 7))

    def sources(self) -> list[Any]:
        layers = [*self.hidden.trainable_variables, *self.out.trainable_variables]
        return [self.embedding, *layers, self.unused]

    def loss(self, features: Any, words: Any, labels: Any) -> tf.Tensor:
        embedded = tf.reduce_mean(tf.nn.embedding_lookup(self.embedding, words), 1)
        found = self.out(self.hidden(tf.concat([features, embedded], 1)))
        return tf.reduce_mean(tf.square(found - labels))


def _train(
    parts: list[tuple[Any, ...]],
    in_function: bool,
    arguments: dict[str, Any],
    seed: int,
) -> list[np.ndarray]:
    """The variables after a step on each of `parts`.

    `alone` in `arguments`: without Horovod. Keras updates rows of embeddings unlike dense tensors.
    """
    model = _Model(seed)
    sources = model.sources()
    optimizer = tf.keras.optimizers.Adam(0.05)
    optimizer.build(sources)
    alone = arguments.get("alone", False)
    if not alone:
        hvd.broadcast_variables([*sources, *optimizer.variables], 0)

    def step(*batch: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(*batch)
        if not alone:
            tape = hvd.DistributedGradientTape(tape, **arguments)
        gradients = tape.gradient(loss, sources)
        if alone and arguments["sparse_as_dense"]:
            gradients[0] = tf.convert_to_tensor(gradients[0])
        assert gradients[-1] is None
        optimizer.apply_gradients(list(zip(gradients, sources, strict=True))[:-1])

    call = tf.function(step) if in_function else step
    for part in parts:
        call(*[tf.constant(array) for array in part])
    return [np.array(source) for source in sources]


def _on_this_rank(in_function: bool, arguments: dict[str, Any]) -> list[np.ndarray]:
    mine = [array[:, hvd.rank()] for array in _data(hvd.size())]
    return _train(list(zip(*mine, strict=True)), in_function, arguments, seed=hvd.rank())


def _alone(size: int, sparse_as_dense: bool) -> list[np.ndarray]:
    together = [array.reshape(STEPS, size * BATCH, -1) for array in _data(size)]
    arguments = {"alone": True, "sparse_as_dense": sparse_as_dense}
    return _train(list(zip(*together, strict=True)), False, arguments, seed=0)


@pytest.fixture(scope="module")
def expected(tf_pool2: RankPool) -> dict[bool, list[np.ndarray]]:
    """What one process learns, with and without `sparse_as_dense`."""
    return {dense: tf_pool2.run(_alone, 2, dense)[0] for dense in (False, True)}


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense embeddings": {"sparse_as_dense": True},
    "groups": {"groups": 2},
    "predivided": {"gradient_predivide_factor": 2.0},
}


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_learn_what_one_process_does(
    tf_pool2: RankPool, expected: dict[bool, list[np.ndarray]], way: str, in_function: bool
):
    one, other = tf_pool2.run(_on_this_rank, in_function, WAYS[way])
    reference = expected["sparse_as_dense" in WAYS[way]]
    for mine, theirs, alone in zip(one, other, reference, strict=True):
        assert mine.tobytes() == theirs.tobytes()
        np.testing.assert_allclose(mine, alone, rtol=2e-4, atol=2e-5)
    assert one[-1] == 1.0


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_compressed_gradients_keep_ranks_equal(
    tf_pool2: RankPool, expected: dict[bool, list[np.ndarray]], kind: str
):
    arguments = {"compression": getattr(hvd.Compression, kind), "sparse_as_dense": True}
    one, other = tf_pool2.run(_on_this_rank, True, arguments)
    for mine, theirs, alone in zip(one, other, expected[True], strict=True):
        assert mine.tobytes() == theirs.tobytes()
        np.testing.assert_allclose(mine, alone, atol=0.05)


# -- ranks with different amounts of data ---------------------------------------------------


def _uneven(in_function: bool) -> tuple[list[float], int]:
    """Rank r has r + 2 batches, each of which moves the variables by a known amount."""
    variables = [tf.Variable(0.0), tf.Variable([0.0, 0.0], dtype=tf.float64)]

    def step(number: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = variables[0] * number + tf.cast(tf.reduce_sum(variables[1]), tf.float32)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(gradient)

    call = tf.function(step) if in_function else step
    for number in range(hvd.rank() + 2):
        call(tf.constant(float(number + 1)))
    last = int(hvd.join())
    hvd.broadcast_variables(variables, last)
    return [float(variables[0]), *variables[1].numpy().tolist()], last


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_a_rank_that_runs_out_of_data_joins(tf_pool2: RankPool, in_function: bool):
    # Two steps of both ranks, then one of rank 1 alone, whose gradient is divided by 2 as well.
    assert tf_pool2.run(_uneven, in_function) == [([-(1 + 2 + 1.5), -2.5, -2.5], 1)] * 2
