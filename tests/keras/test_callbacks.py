"""The callbacks for `fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.keras.flavours import flavour, front_end
from tests.keras.training import BATCH, FEATURES, OUTPUTS, data, fit, numpy, share, small_model
from tests.ranks import RankPool


def _share(hvd: Any, steps: int) -> tuple[Any, Any]:
    x, y = data(steps)
    return share(x, hvd.rank()), share(y, hvd.rank())


# -- broadcast -----------------------------------------------------------------------------------


def _state(model: Any) -> list[Any]:
    from horovod._keras.variables import optimizer_variables

    return [numpy(v) for v in [*model.weights, *optimizer_variables(model.optimizer)]]


def _broadcast(local: bool) -> tuple[list[Any], list[Any]]:
    """Weights, statistics and moments after one epoch of models that began differently."""
    keras, hvd = front_end()
    keras.utils.set_random_seed(100 + hvd.rank())
    model = keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            keras.layers.Dense(6, name="hidden"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(OUTPUTS, name="out"),
        ]
    )
    mine = model.get_layer("out").weights if local else []
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=mine)
    assert not callback.broadcast_done
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (hvd.rank() + 1)))
    fit(model, optimizer, *_share(hvd, 1), BATCH, callbacks=[callback])
    assert callback.broadcast_done
    out = [numpy(v) for v in model.get_layer("out").weights]
    generators = [numpy(v) for v in model.variables if "seed_generator" in getattr(v, "path", "")]
    return _state(model), [*out, *generators]


def test_all_ranks_get_the_roots_model_and_optimizer(keras_pool: RankPool):
    (first, *_), (second, *_) = keras_pool.run(_broadcast, False)
    assert len(first) == len(second) > 8 + 8
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any(np.asarray(value == np.float32(0.02)).all() for value in first)  # the root's rate


@pytest.mark.parametrize("name", ["tensorflow", "torch"])
def test_local_variables_stay(keras_pools: dict[str, RankPool], name: str):
    (first, mine), (second, theirs) = keras_pools[name].run(_broadcast, True)
    assert not np.array_equal(mine[0], theirs[0])
    np.testing.assert_array_equal(first[0], second[0])
    for one, other in zip(mine[2:], theirs[2:], strict=True):
        assert not np.array_equal(one, other)  # ranks drop different units


def _different_models() -> str:
    keras, hvd = front_end()
    width = 6 + hvd.rank()
    model = keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            keras.layers.Dense(width, name="hidden"),
            keras.layers.Dense(OUTPUTS, name="out"),
        ]
    )
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(ValueError) as caught:
        fit(model, keras.optimizers.SGD(0.1), *_share(hvd, 1), BATCH, callbacks=[callback])
    return str(caught.value)


@pytest.mark.parametrize("name", ["tf_keras", "torch"])
def test_models_that_differ_are_named(keras_pools: dict[str, RankPool], name: str):
    for message in keras_pools[name].run(_different_models):
        assert "hidden/kernel" in message
        assert "(5, 7)" in message
        assert "(5, 6)" in message
        assert "rank 1" in message


def _not_initialised() -> str:
    keras, hvd = front_end()
    model = small_model(keras)
    x, y = _share(hvd, 1)
    hvd.shutdown()
    try:
        with pytest.raises(Exception) as caught:
            fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), x, y, BATCH)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        with pytest.raises(RuntimeError if flavour() in ("torch", "jax") else Exception) as other:
            fit(small_model(keras), keras.optimizers.SGD(0.1), x, y, BATCH, callbacks=[callback])
    finally:
        hvd.init()
    if flavour() in ("tensorflow", "tf_keras"):
        import tensorflow as tf

        from horovod.common.exceptions import HorovodInternalError

        assert isinstance(other.value, tf.errors.FailedPreconditionError)
        assert isinstance(other.value, HorovodInternalError)
    assert "not initialised: call hvd.init() first" in str(other.value)
    return str(caught.value)


def test_horovod_must_be_initialised(keras_pool: RankPool):
    for message in keras_pool.run(_not_initialised):
        assert "not initialised: call hvd.init() first" in message


def _wrong_local_variables() -> None:
    _, hvd = front_end()
    with pytest.raises(ValueError, match="local_variables must be variables, not int"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1])


def test_local_variables_are_checked(keras_pools: dict[str, RankPool]):
    keras_pools["torch"].run(_wrong_local_variables)


# -- metrics ---------------------------------------------------------------------------------------


def _metrics() -> tuple[dict[str, Any], dict[str, Any], int, Any]:
    keras, hvd = front_end()
    from tests.keras.test_optimizer import _requests

    seen: dict[str, Any] = {}

    class Consumer(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.update(logs)

    model = small_model(keras)
    x, y = _share(hvd, 2)
    arguments = {
        "callbacks": [hvd.callbacks.MetricAverageCallback(), Consumer()],
        "validation_data": (x[:BATCH], y[:BATCH]),
        "sample_weight": np.linspace(0.5, 1.5, len(x)).astype("float32"),
        "compile_arguments": {"metrics": ["mae"], "weighted_metrics": ["mse"]},
    }
    histories: list[Any] = []
    requests = _requests(
        lambda: histories.append(fit(model, keras.optimizers.SGD(0.0), x, y, BATCH, **arguments))
    )
    own = model.evaluate(x[:BATCH], y[:BATCH], verbose=0, return_dict=True)
    return histories[0].history, seen, len(requests), own


def test_metrics_are_averaged_in_one_exchange(keras_pool: RankPool):
    (first, seen, requests, own), (second, _, _, other) = keras_pool.run(_metrics)
    assert first == second
    assert {name: [value] for name, value in seen.items()} == first
    assert {"loss", "mae", "val_loss", "val_mae"} <= set(first)
    assert requests == 1
    assert own["mae"] != other["mae"]
    assert first["val_mae"][0] == pytest.approx((own["mae"] + other["mae"]) / 2, rel=1e-5)


def _odd_logs() -> dict[str, Any]:
    keras, hvd = front_end()
    callback = hvd.callbacks.MetricAverageCallback()
    callback.set_model(small_model(keras))
    logs = {"many": np.array([1.0, hvd.rank()]), "text": "a", "one": np.float32(hvd.rank())}
    callback.on_epoch_end(0, logs)
    with pytest.raises(RuntimeError, match="different metrics"):
        callback.on_epoch_end(1, {"ab"[hvd.rank()]: 1.0})
    return logs


def test_odd_metrics(keras_pools: dict[str, RankPool]):
    for logs in keras_pools["tensorflow"].run(_odd_logs):
        assert logs["many"].tolist() == [1.0, 0.5]
        assert (logs["text"], logs["one"]) == ("a", 0.5)


# -- learning rates --------------------------------------------------------------------------------


def _rates(callbacks: Any, epochs: int, steps: int, optimizer: str = "SGD") -> Any:
    """The learning rate of every batch, History, and the weights."""
    keras, hvd = front_end()
    rates: list[float] = []

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(round(float(numpy(self.model.optimizer.learning_rate)), 6))

    model = small_model(keras)
    distributed = hvd.DistributedOptimizer(getattr(keras.optimizers, optimizer)(0.4, momentum=0.9))
    history = fit(
        model,
        distributed,
        *_share(hvd, steps),
        BATCH,
        epochs=epochs,
        callbacks=[*callbacks(hvd.callbacks), Recorder()],
    )
    return rates, history.history["lr"], model.get_weights()


def test_warm_up(keras_pool: RankPool):
    def callbacks(module: Any) -> list[Any]:
        return [module.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)]

    for rates, lr, _ in keras_pool.run(_rates, callbacks, 3, 2):
        assert rates == [0.25, 0.3, 0.35, 0.4, 0.4, 0.4]
        assert lr == pytest.approx([0.3, 0.4, 0.4])


def test_schedules(keras_pools: dict[str, RankPool]):
    def callbacks(module: Any) -> list[Any]:
        schedule = module.LearningRateScheduleCallback
        return [
            schedule(1.0, lambda epoch: 1.0 - epoch / 4, end_epoch=2, staircase=False),
            schedule(1.0, 0.1, start_epoch=2, end_epoch=4),
        ]

    for rates, lr, _ in keras_pools["torch"].run(_rates, callbacks, 5, 2):
        assert rates == [1.0, 0.875, 0.75, 0.625, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1]
        assert lr == pytest.approx([0.875, 0.625, 1.0, 0.1, 0.1])


def _corrected(legacy: bool) -> tuple[list[float], float]:
    """Where momentum alone leads after the learning rate was halved: with the gradient at zero."""
    keras, hvd = front_end()
    optimizers = keras.optimizers.legacy if legacy else keras.optimizers
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((1, 1), "float32")])
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0, momentum=0.5))
    places: list[float] = []

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            places.append(float(numpy(self.model.weights[0]).item()))

    schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, 0.5)
    # The loss is the weight itself in the first epoch, and nothing in the second.
    model.compile(optimizer=optimizer, loss=lambda y_true, y_pred: y_pred)
    for epoch, value in enumerate([1.0, 0.0]):
        x = np.full((1, 1), value, "float32")
        model.fit(
            x, x, initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=[schedule, Recorder()]
        )
    return places, float(numpy(model.optimizer.learning_rate))


def test_momentum_is_corrected(keras_pool: RankPool):
    for places, rate in keras_pool.run(_corrected, False):
        assert rate == 0.5
        assert places == [-1.0, -1.25]  # momentum 0.5 of a step of 1, at half the rate


def test_momentum_of_legacy_optimizers_is_corrected(keras_pools: dict[str, RankPool]):
    for places, _ in keras_pools["tf_keras"].run(_corrected, True):
        assert places == [-1.0, -1.25]


def _refused_rates() -> None:
    keras, hvd = front_end()
    schedule, warm_up = (
        hvd.callbacks.LearningRateScheduleCallback,
        hvd.callbacks.LearningRateWarmupCallback,
    )
    with pytest.raises(ValueError, match="initial_lr is needed"):
        schedule(None, 0.1)
    without_steps = warm_up(0.1)
    without_steps.set_params({"epochs": 1})
    with pytest.raises(ValueError, match="pass steps_per_epoch to LearningRateWarmupCallback"):
        without_steps.on_train_begin()
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    with pytest.raises(ValueError, match="a schedule of its own"):
        fit(
            small_model(keras),
            keras.optimizers.SGD(rate),
            *_share(hvd, 1),
            BATCH,
            callbacks=[schedule(0.1, 0.5)],
        )


def test_wrong_learning_rates_are_refused(keras_pools: dict[str, RankPool]):
    keras_pools["torch"].run(_refused_rates)


# -- best model ------------------------------------------------------------------------------------


def _best(folder: str) -> tuple[bool, str]:
    keras, hvd = front_end()
    checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    arguments = {"callbacks": [checkpoint], "epochs": 2}
    x, y = _share(hvd, 1)
    with pytest.raises(ValueError, match="set its filepath first"):
        fit(small_model(keras), keras.optimizers.SGD(0.01), x, y, BATCH, **arguments)
    path = Path(folder) / f"{flavour()}{hvd.rank()}.keras"
    checkpoint.filepath = str(path)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model = small_model(keras)
    fit(model, optimizer, x, y, BATCH, **arguments)
    loaded = keras.models.load_model(path)
    same = all(map(np.array_equal, loaded.get_weights(), model.get_weights()))
    return same, checkpoint.save_best_only


def test_best_model_checkpoint(keras_pool: RankPool, tmp_path: Path):
    assert keras_pool.run(_best, str(tmp_path)) == [(True, True)] * 2
