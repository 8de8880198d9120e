"""Training on two ranks is training on one with both batches, and bitwise equal on both ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras.flavours import front_end
from tests.keras.training import BATCH, FEATURES, OUTPUTS, fit, fit_alone, fit_together
from tests.ranks import RankPool


def _optimizers(keras: Any) -> dict[str, Any]:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return {
        "momentum, clipped": lambda: keras.optimizers.SGD(0.2, momentum=0.9, global_clipnorm=0.5),
        "schedule, decay, average": lambda: keras.optimizers.Adam(
            schedule, weight_decay=0.01, clipnorm=0.3, use_ema=True, ema_overwrite_frequency=2
        ),
    }


def _train(which: str, **arguments: Any) -> tuple[list[Any], list[Any], Any]:
    keras, hvd = front_end()
    make = _optimizers(keras)[which]
    original = make()
    optimizer = hvd.DistributedOptimizer(original)
    together = fit_together(keras, hvd, optimizer, epochs=2, **arguments)
    alone = fit_alone(keras, make(), epochs=2)
    facts = (
        type(optimizer).__name__,
        isinstance(optimizer, type(original)),
        int(np.array(optimizer.iterations)),
        len(optimizer.variables) == len(optimizer.variables()),
    )
    return together.get_weights(), alone.get_weights(), facts


@pytest.mark.parametrize("which", ["momentum, clipped", "schedule, decay, average"])
def test_two_ranks_train_like_one(keras_pool: RankPool, which: str):
    (first, alone, facts), (second, _, _) = keras_pool.run(_train, which)
    for ours, theirs, reference in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, reference, rtol=2e-4, atol=2e-6)
    name = {"m": "SGD", "s": "Adam"}[which[0]]
    assert facts == (name, True, 8, True)


def _train_eagerly() -> tuple[list[Any], list[Any]]:
    keras, hvd = front_end()
    arguments: Any = {"compile_arguments": {"run_eagerly": True}}
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.2, momentum=0.9))
    together = fit_together(keras, hvd, optimizer, 2, **arguments)
    alone = fit_alone(keras, keras.optimizers.SGD(0.2, momentum=0.9), 2)
    return together.get_weights(), alone.get_weights()


def test_eager_steps(tensorflow_keras_pool: RankPool):
    (ours, reference), _ = tensorflow_keras_pool.run(_train_eagerly)
    for one, other in zip(ours, reference, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)


def _several_steps_at_once() -> tuple[list[Any], list[Any]]:
    keras, hvd = front_end()
    arguments: Any = {
        "compile_arguments": {"steps_per_execution": 2},
        "steps_per_epoch": 2,
        "epochs": 2,
    }
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.2, momentum=0.9))
    together = fit_together(keras, hvd, optimizer, 4, **arguments)
    alone = fit_alone(keras, keras.optimizers.SGD(0.2, momentum=0.9), 4, **arguments)
    return together.get_weights(), alone.get_weights()


def test_several_steps_in_one_execution(keras_pools: dict[str, RankPool]):
    (ours, reference), _ = keras_pools["tensorflow"].run(_several_steps_at_once)
    for one, other in zip(ours, reference, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)


def _different_gradients() -> tuple[str, list[float]]:
    """Models of different widths, whose gradients cannot be added; then one that works."""
    keras, hvd = front_end()
    model = keras.Sequential(
        [keras.layers.Input((FEATURES,)), keras.layers.Dense(OUTPUTS + hvd.rank())]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    x = np.ones((BATCH, FEATURES), "float32")
    y = np.ones((BATCH, OUTPUTS + hvd.rank()), "float32")
    with pytest.raises(Exception) as caught:
        fit(model, optimizer, x, y, BATCH)
    works = fit_together(keras, hvd, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), 1)
    return str(caught.value), works.get_weights()[0].sum().item()


def test_gradients_that_cannot_be_added(keras_pool: RankPool):
    (first, one), (second, other) = keras_pool.run(_different_gradients)
    for message in (first, second):
        assert "DistributedOptimizer.0" in message
        assert "rank 1" in message
    assert one == other
