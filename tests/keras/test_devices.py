"""Training on a GPU that two ranks share: like training alone, and bitwise equal on both.

Skipped where torch has no GPU, and for each backend that has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.keras.conftest import PatientPool
from tests.keras.flavours import FLAVOURS, flavour, front_end
from tests.keras.training import BATCH, FEATURES, data, fit, fit_alone, fit_together, share
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHARED = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # or the first rank takes all memory
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the same for JAX
    "JAX_DEFAULT_MATMUL_PRECISION": "float32",  # or products are rounded to a few digits
}


def has_gpu() -> bool:
    """Whether this rank's framework computes on a GPU."""
    keras, _ = front_end()
    if flavour() == "torch":
        return keras.ops.zeros(1).is_cuda
    if flavour() == "jax":
        return {each.platform for each in keras.ops.zeros(1).devices()} == {"gpu"}
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def gpu_pool(name: str) -> Iterator[RankPool]:
    pool = PatientPool(2, FLAVOURS[name] | SHARED)
    try:
        if not all(pool.run(has_gpu)):
            pytest.skip(f"no GPU for {name}")
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module", params=["torch", "jax"])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield from gpu_pool(request.param)


@pytest.fixture(scope="module", params=["tensorflow", "tf_keras"])
def tensorflow_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield from gpu_pool(request.param)


def check(outcomes: list[tuple[list[np.ndarray], list[np.ndarray]]]) -> None:
    (first, alone), (second, _) = outcomes
    for ours, theirs, reference in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, reference, rtol=5e-4, atol=5e-6)


# -- backends that can do everything ---------------------------------------------------------


def train(passes: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        backward_passes_per_step=passes,
        average_aggregated_gradients=True,
    )
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    together = fit_together(keras, hvd, optimizer, 4, epochs=2, callbacks=callbacks)
    accumulating = {"gradient_accumulation_steps": passes} if passes > 1 else {}
    plain = keras.optimizers.SGD(0.1, momentum=0.9, **accumulating)
    return together.get_weights(), fit_alone(keras, plain, 4, epochs=2).get_weights()


@pytest.mark.parametrize("passes", [1, 2])
def test_two_ranks_train_like_one(pool: RankPool, passes: int):
    check(pool.run(train, passes))


def values() -> list[Any]:
    keras, hvd = front_end()
    own = keras.ops.convert_to_tensor(np.float32([hvd.rank() + 1.0, 2.0]))
    rows = keras.ops.convert_to_tensor(np.full((hvd.rank() + 1, 2), hvd.rank(), "int32"))
    results = [
        hvd.allreduce(own),
        hvd.allgather(rows),
        hvd.broadcast(own, 1),
        hvd.reducescatter(own, op=hvd.Sum),
    ]
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.set_weights([weight + hvd.rank() for weight in model.get_weights()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
    return [
        *(keras.ops.convert_to_numpy(result).tolist() for result in results),
        model.get_weights()[0].tolist(),
    ]


def test_values_and_variables(pool: RankPool):
    first, second = pool.run(values)
    for rank, seen in enumerate((first, second)):
        assert seen[:4] == [
            [1.5, 2.0],
            [[0, 0], [1, 1], [1, 1]],
            [2.0, 2.0],
            [[3.0], [4.0]][rank],
        ]
    assert first[4] == second[4]


# -- TensorFlow, without matrix products ------------------------------------------------------


def scaling_model(keras: Any) -> Any:
    class Scale(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(FEATURES,), initializer="ones", name="scale")
            self.shift = self.add_weight(shape=(FEATURES,), initializer="zeros", name="shift")

        def call(self, inputs: Any) -> Any:
            return inputs * self.scale + self.shift

    return keras.Sequential([keras.layers.Input((FEATURES,)), Scale(), Scale()])


def train_scales(run_eagerly: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    keras, hvd = front_end()
    x, _ = data(4)
    y = 3 * x + 1
    rank = hvd.rank()
    together = scaling_model(keras)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    # Keras chooses XLA on a GPU, and Horovod's callbacks tell it not to.
    arguments: Any = {"callbacks": [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]}
    compiling: Any = {"run_eagerly": True} if run_eagerly else {}
    arguments["compile_arguments"] = compiling
    fit(together, optimizer, share(x, rank), share(y, rank), BATCH, epochs=2, **arguments)
    alone = scaling_model(keras)
    arguments = {"compile_arguments": {"jit_compile": False} | compiling}
    fit(alone, keras.optimizers.Adam(0.1), x, y, 2 * BATCH, epochs=2, **arguments)
    import tensorflow as tf

    places = {tf.DeviceSpec.from_string(_device(weight)).device_type for weight in alone.weights}
    assert places == {"GPU"}
    return together.get_weights(), alone.get_weights()


def _device(weight: Any) -> str:
    return getattr(weight, "value", weight).device if hasattr(weight, "path") else weight.device


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_tensorflow_trains_like_one(tensorflow_pool: RankPool, run_eagerly: bool):
    check(tensorflow_pool.run(train_scales, run_eagerly))
