"""DistributedOptimizer(local_steps=...) and LocalStepsCallback, in every Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras.flavours import front_end
from tests.keras.training import BATCH, FEATURES, OUTPUTS, data, fit, numpy, share
from tests.ranks import RankPool

RATE, STEPS, WARMUP, EVERY = 0.125, 9, 2, 3
START = np.linspace(-1, 1, FEATURES * OUTPUTS, dtype=np.float32).reshape(FEATURES, OUTPUTS)


def _model(keras: Any, start: np.ndarray) -> Any:
    """Predicts linearly, so that its gradient is a line of numpy."""
    layer = keras.layers.Dense(OUTPUTS, use_bias=False)
    model = keras.Sequential([keras.layers.Input((FEATURES,)), layer])
    model.set_weights([start])
    return model


class _Run:
    """One training of a rank: the weights after each batch, and what a checkpoint would hold."""

    def __init__(self, start: np.ndarray, steps: range, state: Any = None, **options: Any) -> None:
        keras, hvd = front_end()
        arguments = {"local_steps": EVERY, "outer": hvd.OuterSGD(0.5, 0.5), **options}
        optimizer = keras.optimizers.SGD(RATE)
        distributed = hvd.DistributedOptimizer(optimizer, **arguments)
        self.model = _model(keras, start)
        self.callback = hvd.callbacks.LocalStepsCallback()
        if state is not None:
            self.callback.load_state_dict(state)
        self.weights: list[np.ndarray] = []
        self.states: list[Any] = []
        run = self

        class Recorder(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                run.weights.append(numpy(self.model.get_weights()[0]))
                run.states.append(run.callback.state_dict())

        x, y = data(STEPS)
        mine = slice(steps.start * BATCH, steps.stop * BATCH)
        rank = hvd.rank()
        fit(
            self.model,
            distributed,
            share(x, rank)[mine],
            share(y, rank)[mine],
            BATCH,
            callbacks=[self.callback, Recorder()],
        )
        self.final = numpy(self.model.get_weights()[0])


def _reference() -> list[list[np.ndarray]]:
    """What each of two ranks has after each step, from the definition of DiLoCo."""
    x, y = data(STEPS)
    parts = [(share(x, rank), share(y, rank)) for rank in range(2)]
    anchor, velocity, values, found = START, np.zeros_like(START), [START, START], []
    for step in range(1, STEPS + 1):
        rows = slice((step - 1) * BATCH, step * BATCH)
        slopes = [
            2 * a[rows].T @ (a[rows] @ value - b[rows]) / (BATCH * OUTPUTS)
            for value, (a, b) in zip(values, parts, strict=True)
        ]
        if step <= WARMUP:
            slopes = [sum(slopes) / 2] * 2
        values = [value - RATE * slope for value, slope in zip(values, slopes, strict=True)]
        if step <= WARMUP:
            anchor = values[0]
        elif (step - WARMUP) % EVERY == 0:
            gradient = anchor - sum(values) / 2
            velocity = 0.5 * velocity + gradient
            anchor = anchor - 0.5 * (gradient + 0.5 * velocity)
            values = [anchor] * 2
        found.append(values)
    return found


def _trained() -> dict[str, Any]:
    _, hvd = front_end()
    run = _Run(START, range(STEPS), warmup_steps=WARMUP, average_state=True)
    found: dict[str, Any] = {"weights": run.weights, "final": run.final}
    half = 6  # between two synchronisations
    first = _Run(START, range(half), warmup_steps=WARMUP)
    assert np.array_equal(first.weights[-1], run.weights[half - 1])
    rest = range(half, STEPS)
    second = _Run(first.weights[-1], rest, first.states[-1], warmup_steps=WARMUP)
    for one, other in zip(second.weights, run.weights[half:], strict=True):
        assert np.array_equal(one, other)
    different = _Run(START + hvd.rank(), range(EVERY))  # the ranks begin differently, at once
    found["from other starts"] = different.final
    return found


def test_every_synchronisation_is_the_definition(keras_pool: RankPool):
    """Also: ranks are bitwise equal then, and resuming equals no interruption."""
    results = keras_pool.run(_trained)
    for step, values in enumerate(_reference()):
        for rank, value in enumerate(values):
            np.testing.assert_allclose(results[rank]["weights"][step], value, rtol=1e-4, atol=1e-5)
    one, other = results
    for step in range(STEPS):
        is_equal = np.array_equal(one["weights"][step], other["weights"][step])
        assert is_equal == (step < WARMUP or (step + 1 - WARMUP) % EVERY == 0), step
    assert np.array_equal(one["final"], other["final"])
    assert np.array_equal(one["from other starts"], other["from other starts"])


def _refused() -> list[str]:
    keras, hvd = front_end()
    found = []
    for options in (
        {"local_steps": 0},
        {"warmup_steps": 2},
        {"local_steps": 2, "outer": 1.0},
        {"local_steps": 2, "op": hvd.Sum},
        {"local_steps": 2, "backward_passes_per_step": 2},
    ):
        with pytest.raises(ValueError, match=r"local_steps|outer") as caught:
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
        found.append(str(caught.value))
    plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    x, y = data(1)
    with pytest.raises(ValueError, match="compile the model with"):
        fit(_model(keras, START), plain, x, y, 4, callbacks=[hvd.callbacks.LocalStepsCallback()])
    with pytest.raises(Exception, match="differs between ranks: 2 on rank 0, 3 on rank 1"):
        _Run(START, range(1), local_steps=2 + hvd.rank())
    return found


def test_wrong_arguments_are_named(keras_pool: RankPool):
    for messages in keras_pool.run(_refused):
        assert messages[0] == "local_steps must be a number of at least 1, not 0"
        assert messages[1] == "warmup_steps needs local_steps: say how many there are to be"
        assert messages[2].startswith("outer must be a hvd.OuterSGD object")
        assert messages[3] == "local_steps averages models: leave op at hvd.Average"
        assert "gradient_accumulation_steps" in messages[4]
