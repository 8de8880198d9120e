"""SyncBatchNormalization against an ordinary layer on all batches, in Keras 3 and tf-keras."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from tests.ranks import RankPool
from tests.tensorflow.conftest import tensorflow_pool


@pytest.fixture(scope="module")
def legacy_pool2() -> Iterator[RankPool]:
    """Two ranks whose tf.keras is tf-keras."""
    yield from tensorflow_pool(2, {"TF_USE_LEGACY_KERAS": "1"})


@pytest.fixture(params=["keras3", "tf_keras"])
def pool(request: pytest.FixtureRequest, tf_pool2: RankPool, legacy_pool2: RankPool) -> RankPool:
    return tf_pool2 if request.param == "keras3" else legacy_pool2


def _ordinary(**arguments: Any) -> Any:
    """A layer that computes by itself what ours computes with the others."""
    if not hasattr(tf.keras, "Variable"):  # tf-keras, whose fused kernel estimates otherwise
        arguments["fused"] = False
    return tf.keras.layers.BatchNormalization(**arguments)


def _case(rows: list[int], shape: list[int], seed: int = 1) -> tuple[list[Any], list[Any]]:
    """Every rank's batch, and what its outputs are multiplied with in the loss."""
    random = np.random.default_rng(seed)
    batches = [random.normal(3.0, 2.0, (count, *shape)) for count in rows]
    return batches, [random.normal(size=batch.shape) for batch in batches]


def _pass(layer: Any, batch: Any, factors: Any, dtype: str, mask: Any = None) -> dict[str, Any]:
    batch = tf.constant(batch, dtype)
    keywords = {} if mask is None else {"mask": tf.constant(mask)}
    with tf.GradientTape() as tape:
        tape.watch(batch)
        outputs = layer(batch, training=True, **keywords)
        loss = tf.reduce_sum(tf.cast(outputs, tf.float64) * factors)
    gradients = tape.gradient(loss, [batch, *layer.trainable_variables])
    return {
        "type": outputs.dtype.name,
        "outputs": tf.cast(outputs, tf.float64).numpy(),
        "input": tf.cast(gradients[0], tf.float64).numpy(),
        "weights": [gradient.numpy() for gradient in gradients[1:]],
        "moving": [np.asarray(variable) for variable in layer.non_trainable_variables],
    }


def _compare(
    rows: list[int],
    shape: list[int],
    dtype: str = "float32",
    policy: str | None = None,
    in_function: bool = False,
    masked: bool = False,
    **arguments: Any,
) -> None:
    rank = hvd.rank()
    batches, factors = _case(rows, shape)
    masks: list[Any] = [None] * len(rows)
    if masked:
        random = np.random.default_rng(2)
        masks = [random.random(batch.shape[:-1]) < 0.6 for batch in batches]
    layer = hvd.SyncBatchNormalization(dtype=policy or dtype, **arguments)
    assert layer.name.startswith("sync_batch_normalization")
    everything = np.concatenate(batches)
    layer.build(everything.shape)
    run = tf.function(_outputs(layer)) if in_function else _outputs(layer)
    mine = _pass_by(run, layer, batches[rank], factors[rank], dtype, masks[rank])
    alone = _ordinary(dtype=policy or dtype, **arguments)
    alone.build(everything.shape)
    mask = np.concatenate(masks) if masked else None
    expected = _pass(alone, everything, np.concatenate(factors), dtype, mask)
    begin = sum(rows[:rank])
    part = slice(begin, begin + rows[rank])
    close = {"rtol": 2e-2, "atol": 2e-2} if policy else {"rtol": 1e-4, "atol": 1e-4}
    assert mine["type"] == expected["type"]
    np.testing.assert_allclose(mine["outputs"], expected["outputs"][part], **close)
    np.testing.assert_allclose(mine["input"], expected["input"][part], **close)
    for own, whole in zip(mine["weights"], expected["weights"], strict=True):
        total = hvd.allreduce(own, op=hvd.Sum).numpy()
        np.testing.assert_allclose(total, whole, rtol=close["rtol"], atol=10 * close["atol"])
    for own, whole in zip(mine["moving"], expected["moving"], strict=True):
        np.testing.assert_allclose(own, whole, **close)
        both = hvd.allgather(own.reshape(1, -1)).numpy()
        assert both[0].tobytes() == both[1].tobytes()


def _outputs(layer: Any) -> Any:
    return lambda batch, **keywords: layer(batch, training=True, **keywords)


def _pass_by(run: Any, layer: Any, *arguments: Any) -> dict[str, Any]:
    class Caller:
        trainable_variables = layer.trainable_variables
        non_trainable_variables = layer.non_trainable_variables

        def __call__(self, batch: Any, training: bool, **keywords: Any) -> Any:
            return run(batch, **keywords)

    return _pass(Caller(), *arguments)


CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "even": ([4, 4], [3], {}),
    "uneven": ([1, 6], [5], {}),
    "an empty batch": ([0, 5], [2], {}),
    "images": ([2, 3], [4, 4, 3], {}),
    "channels first": ([3, 2], [3, 4, 4], {"axis": 1}),
    "double": ([3, 4], [3], {"dtype": "float64"}),
    "plain": ([3, 4], [3], {"center": False, "scale": False, "momentum": 0.5, "epsilon": 0.1}),
    "in a function": ([2, 5], [3], {"in_function": True}),
    "mixed precision": ([6, 3], [4], {"policy": "mixed_float16"}),
    "mixed bfloat16": ([6, 3], [4], {"policy": "mixed_bfloat16"}),
    "masked": ([3, 2], [6, 4], {"masked": True}),
}


def _run_case(name: str) -> None:
    rows, shape, keywords = CASES[name]
    if "policy" in keywords:
        # As users say it: legacy Keras takes no name of a policy as a layer's dtype.
        tf.keras.mixed_precision.set_global_policy(keywords["policy"])
        keywords = {**keywords, "policy": tf.keras.mixed_precision.Policy(keywords["policy"])}
    try:
        _compare(rows, shape, **keywords)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("name", CASES)
def test_like_one_layer_on_all_batches(pool: RankPool, name: str):
    pool.run(_run_case, name)


def _large_mean() -> list[float]:
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    # float32 squares near 1e8 are 8 apart: a variance of 0.25 would drown in sums of them.
    batch = 1e4 + np.array([[0.0], [1.0]], np.float32) * (hvd.rank() + 1) * 0.5
    layer(batch, training=True)
    return np.asarray(layer.moving_variance).tolist()


def test_a_large_mean_does_not_drown_the_variance(pool: RankPool):
    (one,), (other,) = pool.run(_large_mean)
    assert one == other
    np.testing.assert_allclose(one, np.var([0.0, 0.5, 0.0, 1.0]), rtol=1e-3)


def _joined() -> list[float]:
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    for number in range(hvd.rank() + 1):
        batch = tf.constant([[float(number)], [number + 2.0 + 2 * hvd.rank()]])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(batch, training=True) ** 2)
        hvd.DistributedGradientTape(tape).gradient(loss, layer.trainable_variables)
    hvd.join()
    return [float(layer.moving_mean[0]), float(layer.moving_variance[0])]


def test_a_rank_that_has_joined_does_not_count(pool: RankPool):
    assert pool.run(_joined) == [[1.5, float(np.var([0.0, 2.0, 0.0, 4.0]))], [3.0, 4.0]]


def _evaluation() -> None:
    layer = hvd.SyncBatchNormalization()
    layer.build((None, 2))
    if hvd.rank() == 0:  # needs nobody
        np.testing.assert_allclose(layer(tf.ones([1, 2]), training=False), 1.0, rtol=1e-3)


def test_evaluation_needs_no_other_rank(pool: RankPool):
    pool.run(_evaluation)


def _second_order() -> None:
    batches, factors = _case([2, 3], [2])

    def penalty(layer: Any, batch: Any, weights: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(batch)
            with tf.GradientTape() as inner:
                inner.watch(batch)
                loss = tf.reduce_sum(layer(batch, training=True) ** 3 * weights)
            total = tf.reduce_sum(inner.gradient(loss, batch) ** 2)
        return outer.gradient(total, batch).numpy()

    rank = hvd.rank()
    own = penalty(
        hvd.SyncBatchNormalization(dtype="float64"), tf.constant(batches[rank]), factors[rank]
    )

    def by_the_book(batch: Any, training: bool) -> Any:  # tf.nn.moments hides a second derivative
        centred = batch - tf.reduce_mean(batch, 0)
        return centred * tf.math.rsqrt(tf.reduce_mean(centred**2, 0) + 1e-3)

    whole = penalty(by_the_book, tf.constant(np.concatenate(batches)), np.concatenate(factors))
    np.testing.assert_allclose(own, whole[:2] if rank == 0 else whole[2:], rtol=1e-6)


def test_gradients_of_gradients(pool: RankPool):
    pool.run(_second_order)


def _v1_graph() -> list[Any]:
    """Two layers beside each other, of which a session may run either first."""
    rank, v1 = hvd.rank(), tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        inputs = tf.constant([[1.0 + rank], [3.0 - rank]])
        layers = [hvd.SyncBatchNormalization(epsilon=0.0) for _ in range(2)]
        outputs = [layers[0](inputs, training=True), layers[1](inputs * -5.0, training=True)]
        gradients = [tf.gradients(output[0, 0] * (rank + 1.0), inputs)[0] for output in outputs]
        session.run(v1.global_variables_initializer())
        return [np.array(values).tolist() for values in session.run([outputs, gradients])]


def test_v1_graphs(legacy_pool2: RankPool):
    # Together 1, 3, 2, 2: the mean is 2, the variance 1/2. The loss is x0 + 2 x2, normalised.
    (one, slope), (other, other_slope) = legacy_pool2.run(_v1_graph)
    root = np.sqrt(2.0)
    np.testing.assert_allclose(one, [[[-root], [root]], [[root], [-root]]], rtol=1e-5)
    np.testing.assert_allclose(other, np.zeros((2, 2, 1)), atol=1e-5)
    whole = root * (np.array([1, 0, 2, 0]) - 0.75 - np.array([-1, 1, 0, 0]) * -1 / 2)
    for place, sign in ((0, 1), (1, -1)):
        np.testing.assert_allclose(np.ravel(slope[place]), sign * whole[:2], rtol=1e-4)
        np.testing.assert_allclose(np.ravel(other_slope[place]), sign * whole[2:], rtol=1e-4)


def _model(layer: Any) -> Any:
    tf.keras.utils.set_random_seed(7)
    layers = tf.keras.layers
    inputs = tf.keras.Input((4,))
    return tf.keras.Model(inputs, layers.Dense(1)(layer(layers.Dense(6)(inputs))))


def _train() -> list[bytes]:
    rank, size, steps = hvd.rank(), hvd.size(), 4
    random = np.random.default_rng(5)
    data = random.normal(size=(steps, size, 6, 4)).astype(np.float32)

    def train(model: Any, batches: Any, is_alone: bool) -> list[Any]:
        @tf.function
        def step(batch: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(batch, training=True) - 1.0) ** 2)
            if not is_alone:
                tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            for gradient, variable in zip(gradients, model.trainable_variables, strict=True):
                variable.assign(variable - 0.1 * gradient)

        for batch in batches:
            step(tf.constant(batch))
        return [np.asarray(variable) for variable in model.variables]

    mine = train(_model(hvd.SyncBatchNormalization()), data[:, rank], False)
    whole = train(_model(_ordinary()), data.reshape(steps, -1, 4), True)
    for own, alone in zip(mine, whole, strict=True):
        np.testing.assert_allclose(own, alone, rtol=1e-3, atol=1e-4)
    return [own.tobytes() for own in mine]


def test_training_a_model(pool: RankPool):
    one, other = pool.run(_train)
    assert one == other


def _saved(directory: str) -> None:
    path = Path(directory) / f"{hvd.rank()}.keras"
    model = _model(hvd.SyncBatchNormalization(momentum=0.75))
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    layer = loaded.layers[2]
    assert type(layer) is hvd.SyncBatchNormalization
    assert layer.momentum == 0.75
    batch = tf.ones([2, 4])
    np.testing.assert_array_equal(model(batch), loaded(batch))


def test_a_saved_model_loads(pool: RankPool, tmp_path: Path):
    pool.run(_saved, str(tmp_path))


def _fused() -> None:
    for fused in (True, None):
        with pytest.raises(ValueError, match="fused kernel"):
            hvd.SyncBatchNormalization(fused=fused)
    assert hvd.SyncBatchNormalization(fused=False, axis=1).axis in (1, [1])


def test_the_fused_kernel_is_refused(pool: RankPool):
    pool.run(_fused)
