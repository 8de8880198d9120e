"""Steps of the optimizers of every binding, as `hvd.stats()` counts them."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bindings.frameworks import Framework
from tests.ranks import RankPool, clean_environment, run_ranks

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5


def difference(hvd: Any, train: Any) -> dict[str, Any]:
    """What changes in `hvd.stats()` while `train` trains."""
    before = hvd.stats()
    train()
    after = hvd.stats()
    return {
        key: after[key] - before[key]
        for key in ("steps", "step_seconds", "buckets", "bytes_reduced")
    } | {"rate": after["steps_per_second"], "last": after["last_step_seconds"]}


def torch_training(hvd: Any) -> Any:
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def train() -> None:
        for _ in range(STEPS):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def tape_training(hvd: Any) -> Any:
    import tensorflow as tf

    weights = tf.Variable(tf.ones([3, 2]))

    @tf.function
    def step() -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.matmul(tf.ones([2, 3]), weights))
        (gradient,) = tape.gradient(loss, [weights])
        weights.assign_sub(0.1 * gradient)

    def train() -> None:
        for _ in range(STEPS):
            step()

    return train


def jax_training(hvd: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    start = jnp.ones((3, 2))

    @jax.jit
    def step(weights: Any, state: Any) -> Any:
        gradients = jax.grad(lambda w: jnp.sum(jnp.ones((2, 3)) @ w))(weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    def train() -> None:
        weights, state = start, optimizer.init(start)
        for _ in range(STEPS):
            weights, state = step(weights, state)
        jax.block_until_ready(weights)

    return train


def mxnet_training(hvd: Any) -> Any:
    import mxnet as mx

    net = mx.gluon.nn.Dense(2, in_units=3)
    net.initialize()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

    def train() -> None:
        for _ in range(STEPS):
            with mx.autograd.record():
                loss = net(mx.nd.ones((2, 3))).sum()
            loss.backward()
            trainer.step(2)

    return train


TRAINING = {
    "torch": torch_training,
    "tensorflow": tape_training,
    "jax": jax_training,
    "mxnet": mxnet_training,
}


def _steps(framework: Framework) -> dict[str, Any]:
    hvd = framework.hvd
    hvd.init()
    return difference(hvd, TRAINING[framework.name](hvd))


def test_every_binding_counts_steps(shared_ranks: RankPool, framework: Framework):
    for found in shared_ranks.run(_steps, framework, timeout=240):
        assert found["steps"] == STEPS
        assert found["buckets"] >= STEPS
        assert found["bytes_reduced"] >= STEPS * 6 * 4
        assert found["step_seconds"] > 0
        assert found["rate"] > 0
        assert found["last"] > 0


def keras_training(package: str, eagerly: bool) -> dict[str, Any]:
    import keras
    import numpy as np

    hvd = importlib.import_module(package)
    hvd.init()
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(2)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss="mse", run_eagerly=eagerly, jit_compile=False)
    data = np.ones([4 * STEPS, 3]), np.ones([4 * STEPS, 2])
    return difference(hvd, lambda: model.fit(*data, batch_size=4, epochs=1, verbose=0))


def keras_missing() -> bool:
    return not all(map(importlib.util.find_spec, ("keras", "tensorflow")))


@pytest.mark.skipif(keras_missing(), reason="keras or tensorflow is not installed")
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("package", ["horovod.keras", "horovod.tensorflow.keras"])
def test_keras(shared_ranks: RankPool, package: str, eagerly: bool):
    for found in shared_ranks.run(keras_training, package, eagerly, timeout=240):
        assert found["steps"] == STEPS
        assert found["buckets"] == STEPS


def one_rank(rank: int, size: int, framework: Framework) -> dict[str, Any]:
    return _steps(framework)


def test_one_rank_of_which_reports_are_wanted(framework: Framework):
    """A compiled program of one rank has nothing to reduce, and must tell of its steps anyway."""
    env = {"HOROVOD_STATS_INTERVAL": "60", "TF_CPP_MIN_LOG_LEVEL": "2"}
    (found,) = run_ranks(one_rank, 1, framework, env=env, timeout=240)
    assert found["steps"] == STEPS


ONE_KERAS_RANK = """
import keras
from tests.bindings.test_steps import keras_training
print(keras.backend.backend(), keras_training("horovod.keras", False)["steps"])
"""


@pytest.mark.skipif(keras_missing(), reason="keras or tensorflow is not installed")
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_one_rank_of_keras(backend: str):
    """In a process of its own: the fork server of tests may have Keras with another backend."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    env = clean_environment() | {
        "HOROVOD_STATS_INTERVAL": "60",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": backend,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", ONE_KERAS_RANK], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.split() == [backend, str(STEPS)], done.stderr
