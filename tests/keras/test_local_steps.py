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


STREAM = {"local_steps": 4, "fragments": 2, "delay": 2, "warmup_steps": WARMUP}


def _model(keras: Any, starts: list[np.ndarray]) -> Any:
    """Two layers that predict linearly and beside each other, so that gradients are simple."""
    inputs = keras.layers.Input((FEATURES,))
    layers = [keras.layers.Dense(OUTPUTS, use_bias=False) for _ in starts]
    outputs = keras.layers.Concatenate()([layer(inputs) for layer in layers])
    model = keras.Model(inputs, outputs)
    model.set_weights(starts)
    return model


class _Run:
    """One training of a rank: the weights after each batch, and what a checkpoint would hold."""

    def __init__(self, start: Any, steps: range, state: Any = None, **options: Any) -> None:
        keras, hvd = front_end()
        arguments = {"local_steps": EVERY, "outer": hvd.OuterSGD(0.5, 0.5), **options}
        optimizer = keras.optimizers.SGD(RATE)
        distributed = hvd.DistributedOptimizer(optimizer, **arguments)
        self.model = _model(keras, list(start))
        self.callback = hvd.callbacks.LocalStepsCallback()
        if state is not None:
            self.callback.load_state_dict(state)
        self.weights: list[list[np.ndarray]] = []
        self.states: list[Any] = []
        run = self

        class Recorder(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                run.weights.append([numpy(each) for each in self.model.get_weights()])
                run.states.append(run.callback.state_dict())

        x, y = data(STEPS)
        mine = slice(steps.start * BATCH, steps.stop * BATCH)
        rank = hvd.rank()
        fit(
            self.model,
            distributed,
            share(x, rank)[mine],
            np.concatenate([share(y, rank), -share(y, rank)], axis=1)[mine],
            BATCH,
            callbacks=[self.callback, Recorder()],
        )
        self.final = [numpy(each) for each in self.model.get_weights()]


def _reference(
    warmup: int, every: int, first: int, delay: int = 0, keep: float = 0.0, sign: int = 1
) -> list[list[np.ndarray]]:
    """What two ranks have of a layer after each step, from the definition of (streaming) DiLoCo."""
    x, y = data(STEPS)
    parts = [(share(x, rank), sign * share(y, rank)) for rank in range(2)]
    anchor, velocity, values, found = START, np.zeros_like(START), [START, START], []
    sent = velocity
    for step in range(1, STEPS + 1):
        rows = slice((step - 1) * BATCH, step * BATCH)
        slopes = [
            2 * a[rows].T @ (a[rows] @ value - b[rows]) / (BATCH * 2 * OUTPUTS)
            for value, (a, b) in zip(values, parts, strict=True)
        ]
        if step <= warmup:
            slopes = [sum(slopes) / 2] * 2
        values = [value - RATE * slope for value, slope in zip(values, slopes, strict=True)]
        turns = step - warmup - first
        if step <= warmup:
            anchor = values[0]
        if turns >= 0 and turns % every == 0:
            sent = anchor - sum(values) / 2
        if turns >= delay and turns % every == delay:
            velocity = 0.5 * velocity + sent
            anchor = anchor - 0.5 * (sent + 0.5 * velocity)
            values = [keep * value + (1 - keep) * anchor for value in values]
        found.append(values)
    return found


def _check(results: Any, run: str, layer: int, expected: list[list[np.ndarray]]) -> None:
    for step, values in enumerate(expected[: len(results[0][run])]):
        for rank, value in enumerate(values):
            made = results[rank][run][step][layer]
            np.testing.assert_allclose(made, value, rtol=1e-4, atol=1e-5)


def _trained() -> dict[str, Any]:
    _, hvd = front_end()
    both = [START, START]
    run = _Run(both, range(STEPS), warmup_steps=WARMUP, average_state=True)
    found: dict[str, Any] = {"weights": run.weights, "final": run.final}
    stream = _Run(both, range(STEPS), **STREAM)
    found |= {"streamed": stream.weights, "final of the stream": stream.final}
    half = 5  # while a fragment is under way
    first = _Run(both, range(half), **STREAM)
    np.testing.assert_array_equal(first.weights[-1], stream.weights[half - 1])
    second = _Run(first.weights[-1], range(half, STEPS), first.states[-1], **STREAM)
    np.testing.assert_array_equal(second.weights, stream.weights[half:])
    different = _Run([START + hvd.rank()] * 2, range(EVERY))  # the ranks begin differently, at once
    found["from other starts"] = different.final
    found["clusters"] = _Run(both, range(3), local_steps=2, within="host", outer=None).weights
    return found


def test_every_synchronisation_is_the_definition(keras_pool: RankPool):
    """Also: ranks are bitwise equal then, and resuming equals no interruption."""
    results = keras_pool.run(_trained)
    _check(results, "weights", 0, _reference(WARMUP, EVERY, EVERY))
    for layer, sign in enumerate((1, -1)):
        expected = _reference(WARMUP, 4, 2 * layer + 2, delay=2, keep=0.5, sign=sign)
        _check(results, "streamed", layer, expected)
    _check(results, "clusters", 0, _reference(STEPS, 1, 1))  # all on one host: as in a warm-up
    one, other = results
    for step in range(STEPS):
        is_equal = np.array_equal(one["weights"][step], other["weights"][step])
        assert is_equal == (step < WARMUP or (step + 1 - WARMUP) % EVERY == 0), step
    for run in ("final", "final of the stream", "from other starts", "clusters"):
        assert np.array_equal(one[run], other[run]), run


def _refused() -> list[str]:
    keras, hvd = front_end()
    found = []
    for options in (
        {"local_steps": 0},
        {"warmup_steps": 2},
        {"local_steps": 2, "outer": 1.0},
        {"local_steps": 2, "op": hvd.Sum},
        {"local_steps": 2, "backward_passes_per_step": 2},
        {"local_steps": 4, "delay": 4},
        {"local_steps": 4, "alpha": 0.5},
        {"local_steps": 4, "within": "rack"},
    ):
        with pytest.raises(ValueError, match=r"local_steps|outer|alpha|within") as caught:
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
        found.append(str(caught.value))
    plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    x, y = data(1)
    with pytest.raises(ValueError, match="compile the model with"):
        fit(_model(keras, [START]), plain, x, y, 4, callbacks=[hvd.callbacks.LocalStepsCallback()])
    with pytest.raises(Exception, match="differs between ranks: 2 on rank 0, 3 on rank 1"):
        _Run([START, START], range(1), local_steps=2 + hvd.rank())
    with pytest.raises(ValueError, match="the number of layers, 2, and is 3"):
        _Run([START, START], range(1), local_steps=4, fragments=3)
    return found


def test_wrong_arguments_are_named(keras_pool: RankPool):
    for messages in keras_pool.run(_refused):
        assert messages[0] == "local_steps must be a number of at least 1, not 0"
        assert messages[1] == "warmup_steps needs local_steps: say how many there are to be"
        assert messages[2].startswith("outer must be a hvd.OuterSGD object")
        assert messages[3] == "local_steps averages models: leave op at hvd.Average"
        assert "gradient_accumulation_steps" in messages[4]
        assert messages[5].startswith("delay=4 must be less than local_steps=4")
        assert messages[6].startswith("alpha needs delay")
        assert messages[7].startswith("within must be the hvd.ProcessSet")
