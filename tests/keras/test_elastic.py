"""Elastic training with Keras on every backend: states, callbacks, and `fit` that goes on."""

from __future__ import annotations

import importlib
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.elastic.launched import Launched
from tests.elastic.test_driver_hosts import Cluster
from tests.elastic.training import this_worker
from tests.keras.flavours import FLAVOURS, flavour, front_end
from tests.keras.training import numpy
from tests.ranks import RankPool
from tests.runner.horovodrun import ROOT
from tests.tensorflow.growing import (
    PATIENCE,
    await_another,
    grow_and_lose,
    halt,
    lose_one_of_two,
)

EXAMPLE = str(ROOT / "examples" / "elastic" / "tensorflow2_keras_mnist_elastic.py")
STEPS, EPOCHS = 5, 3
X = np.tile(np.arange(12, dtype=np.float32).reshape(4, 3) / 12, (STEPS, 1))
Y = np.tile(np.array([[1.0], [-1.0], [0.5], [2.0]], dtype=np.float32), (STEPS, 1))


def _model(keras: Any, start: float) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.set_weights([np.full((3, 1), start), np.zeros(1)])
    return model


def _flat(model: Any, optimizer: Any = None) -> list[float]:
    """All values of a model and an optimizer, its own if there is no other."""
    found = (optimizer or model.optimizer).variables
    variables = [*model.weights, *(found() if callable(found) else found)]
    return [x for v in variables for x in numpy(v).astype(float).reshape(-1).tolist()]


# -- fit outlives its ranks ------------------------------------------------------------------------


def _train_with_fit() -> dict[str, Any]:
    """Targets differ between ranks, but the average gradient does not depend on the ranks."""
    keras, hvd = front_end()
    hvd.init()
    model = _model(keras, 1.0 + int(this_worker()[1:]))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), loss="mse")
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    history: list[tuple[int, int, int]] = []

    class Probe(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            history.append((hvd.size(), state.epoch, state.batch))
            if history[-1] == (1, 0, 3):
                await_another()
            elif history[-1] == (2, 1, 2) and this_worker() == "w0":
                halt()  # the other one is stuck in its next step

    @hvd.elastic.run
    def train(state: Any) -> None:
        share = 1.0 + 0.5 * (hvd.rank() - (hvd.size() - 1) / 2)
        model.fit(
            *(X, Y * share),
            batch_size=4,
            shuffle=False,
            epochs=EPOCHS - state.epoch,
            verbose=0,
            callbacks=[
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.UpdateBatchStateCallback(state),
                Probe(),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
            ],
        )

    train(state)
    same = _model(keras, 1.0)
    same.compile(keras.optimizers.SGD(0.1, momentum=0.5), loss="mse")
    same.fit(X, Y, batch_size=4, shuffle=False, epochs=EPOCHS, verbose=0)
    return {
        "history": history,
        "values": _flat(model),
        "expected": _flat(same),
        "state": (state.epoch, state.batch),
    }


@pytest.mark.parametrize("name", FLAVOURS)
def test_fit_goes_on_when_ranks_come_and_go(name: str):
    result = grow_and_lose(_train_with_fit, env=FLAVOURS[name])
    together = [(2, 0, 4), (2, 0, 5), (2, 1, 1), (2, 1, 2)]
    alone = [(1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 1, 5), *((1, 2, b) for b in range(1, STEPS + 1))]
    assert result["history"] == together + alone, "a step that was not committed is repeated"
    assert result["state"] == (EPOCHS, 0)
    assert result["values"] == pytest.approx(result["expected"], abs=1e-5)


# -- states ---------------------------------------------------------------------------------------


def _optimizers(keras: Any) -> list[Any]:
    optimizers = [keras.optimizers.Adam]
    if flavour() == "tf_keras":
        optimizers.append(keras.optimizers.legacy.Adam)
    return optimizers


def _rate(optimizer: Any) -> float:
    return float(numpy(optimizer.learning_rate))


def _carry_over() -> list[Any]:
    """Rank 0 has trained, so its optimizer has a state; that of rank 1 has never been used."""
    keras, hvd = front_end()
    results: list[Any] = []
    for kind in _optimizers(keras):
        model = _model(keras, 1.0 + hvd.rank())
        model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.Dropout(0.5))  # has a state of its own in Keras 3
        model.compile(kind(0.25 + hvd.rank()), loss="mse")
        if hvd.rank() == 0:
            model.fit(X, Y, batch_size=4, verbose=0)
        state = hvd.elastic.KerasState(model, epoch=hvd.rank(), batch=3)

        def scale_rate(model: Any = model) -> None:
            model.optimizer.learning_rate = 0.5 * hvd.size()

        state.register_reset_callbacks([scale_rate])
        state.on_reset()
        state.sync()
        synchronised = _flat(model)
        results += [synchronised, _rate(model.optimizer), state.epoch, state.batch]
        for _ in range(2):  # as often as needed, to what was synchronised, without any commit
            model.fit(X, Y, batch_size=4, verbose=0)
            model.optimizer.learning_rate = 0.125
            state.epoch = 9
            assert _flat(model) != synchronised
            state.restore()
            assert _flat(model) == synchronised
            assert (_rate(model.optimizer), state.epoch) == (1.0, 0)
        model.fit(X, Y, batch_size=4, verbose=0)
        state.commit()
        committed = _flat(model)
        model.fit(X, Y, batch_size=4, verbose=0)
        state.restore()
        assert _flat(model) == committed
    return results


def test_all_ranks_get_what_one_has_trained(keras_pool: RankPool):
    first, second = keras_pool.run(_carry_over)
    assert first == second
    assert first[1:4] == [1.0, 0, 3]


def _accumulate() -> list[float]:
    """A step of two passes, of which rank 0 has done one more than rank 1 when they meet."""
    keras, hvd = front_end()
    model = _model(keras, 1.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model.compile(optimizer, loss="mse")

    def train(passes: int) -> None:
        model.fit(X[: 4 * passes], Y[: 4 * passes], batch_size=4, shuffle=False, verbose=0)

    train(2)
    state = hvd.elastic.KerasState(model)
    if hvd.rank() == 0:
        train(1)
    state.sync()
    train(1)
    once = _flat(model)
    state.restore()  # a step that failed between the two leaves nothing behind
    assert _flat(model) != once
    train(1)
    assert _flat(model) == once
    return once


def test_a_step_of_several_passes_is_part_of_the_state(keras_pool: RankPool):
    first, second = keras_pool.run(_accumulate)
    assert first == second


def _fail_in_a_step() -> None:
    """The models of the ranks differ, so their gradients cannot be reduced."""
    keras, hvd = front_end()
    size = 1 + hvd.rank()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(size)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), loss="mse")
    targets = np.repeat(Y, size, axis=1)
    state = hvd.elastic.KerasState(model)
    saved = _flat(model)
    for fail in (model.fit, model.train_on_batch):
        for _ in range(2):
            with pytest.raises(Exception, match="mismatched shape between ranks"):
                fail(X, targets)
            state.restore()
            state.save()
            assert _flat(model) == saved
            model.evaluate(X, targets, verbose=0)


def test_a_step_that_failed_leaves_nothing_behind(keras_pool: RankPool):
    keras_pool.run(_fail_in_a_step)


def _in_a_v1_graph() -> list[float]:
    import tensorflow as tf

    keras, hvd = front_end()
    with tf.Graph().as_default(), tf.compat.v1.Session().as_default():
        model = _model(keras, 1.0 + hvd.rank())
        model.compile(keras.optimizers.legacy.SGD(0.1 + hvd.rank(), momentum=0.5), loss="mse")
        if hvd.rank() == 0:
            model.fit(X, Y, batch_size=4, verbose=0)

        def values() -> list[float]:
            variables = [*model.weights, *model.optimizer.weights]
            found = keras.backend.batch_get_value(variables)
            return [x for value in found for x in np.ravel(value).astype(float).tolist()]

        state = hvd.elastic.KerasState(model)
        state.sync()
        synchronised = values()
        model.fit(X, Y, batch_size=4, verbose=0)
        assert values() != synchronised
        state.restore()
        assert values() == synchronised
        return synchronised


def test_states_in_v1_graphs(keras_pools: dict[str, RankPool]):
    first, second = keras_pools["tf_keras"].run(_in_a_v1_graph)
    assert first == second


def _refuse() -> None:
    keras, hvd = front_end()
    state = hvd.elastic.KerasState(_model(keras, 1.0))
    with pytest.raises(ValueError, match=r"no 'batch'.*batch=0"):
        hvd.elastic.UpdateBatchStateCallback(state)
    with pytest.raises(ValueError, match=r"no 'epoch'.*epoch=0"):
        hvd.elastic.UpdateEpochStateCallback(state)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        hvd.elastic.CommitStateCallback(state, 0)
    with pytest.raises(ValueError, match="'unready' has no variables yet"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)], name="unready"))


def test_what_is_missing_is_said(keras_pool: RankPool):
    keras_pool.run(_refuse)


# -- callbacks ------------------------------------------------------------------------------------


def _call_back() -> None:
    keras, hvd = front_end()

    class Recorder(hvd.elastic.KerasState):  # type: ignore[misc,name-defined]
        def commit(self) -> None:
            commits.append((self.epoch, self.batch))
            super().commit()

    class Stop(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    commits: list[tuple[int, int]] = []
    model = _model(keras, 1.0)
    model.compile("sgd", loss="mse")
    state = Recorder(model, epoch=0, batch=0)
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, 2),
    ]

    def fit(*more: Any, **arguments: Any) -> list[tuple[int, int]]:
        commits.clear()
        given = {"batch_size": 4, "verbose": 0, "callbacks": [*callbacks, *more], **arguments}
        model.fit(X, Y, **given)
        return commits

    assert set(hvd.elastic.__all__) >= {type(callback).__name__ for callback in callbacks}
    assert fit(epochs=2) == [(0, 2), (0, 4), (1, 0), (1, 1), (1, 3), (1, 5), (2, 0)]
    state.batch = 3  # of an epoch that was interrupted: it has 2 more batches, the next has 5
    assert fit(epochs=4, initial_epoch=state.epoch) == [(2, 5), (3, 0), (3, 2), (3, 4), (4, 0)]
    state.batch = 4
    assert fit(Stop(), epochs=9) == [(5, 0)]  # others may stop the training as ever


def test_callbacks_keep_the_state(keras_pool: RankPool):
    keras_pool.run(_call_back)


# -- the documentation and the example ------------------------------------------------------------


def _as_documented(blocks: list[str]) -> list[Any]:
    keras, hvd = front_end()
    tf = importlib.import_module("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(4)
    results: list[Any] = []
    for block in blocks:
        model = _model(keras, 1.0 + hvd.rank())
        names = {
            "model": model,
            "optimizer": keras.optimizers.Adam(),
            "loss_of": keras.losses.MeanSquaredError(),
            "dataset": dataset,
            "batches": iter(dataset),
        }
        exec(block, names)
        optimizer = names["optimizer"] if "GradientTape" in block else model.optimizer
        results.append((_flat(model, optimizer), int(numpy(optimizer.iterations))))
        if "state" in names:
            results.append((names["state"].epoch, names["state"].batch))
    return results


def test_the_page_about_elastic_training(tensorflow_keras_pool: RankPool):
    page = (ROOT / "docs" / "elastic.md").read_text()
    blocks = [b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "tensorflow" in b]
    short = [b.replace("500 //", "8 //").replace("10000 //", "40 //") for b in blocks]
    first, second = tensorflow_keras_pool.run(_as_documented, short)
    assert first == second
    assert [result[1] for result in (first[0], first[2])] == [4 * 24, 20]
    assert first[1] == (24, 0)


def test_the_example_survives_a_kill_and_learns():
    short = ("--epochs", "4", "--lr", "0.003", "--target-accuracy", "0.8")
    output = lose_one_of_two(EXAMPLE, *short, when="Epoch 2/4")
    epochs = [int(number) for number in re.findall(r"Epoch (\d)/4", output)]
    assert epochs == [2, 3, 4], "it goes on from the last commit"
    assert "final test accuracy" in output


def _await_two_epochs(job: Launched) -> None:
    latest = int(re.findall(r"Epoch (\d+)/", job.output)[-1])
    job.await_output(f"Epoch {latest + 2}/")


def test_the_example_takes_in_a_new_host_and_survives_the_loss_of_the_first(tmp_path: Path):
    """Under the real launcher."""
    cluster = Cluster(tmp_path, "alpha:1")
    program = [EXAMPLE, "--epochs", "1000000"]
    how = {"program": program, "env": cluster.env, "patience": PATIENCE, "forked": True}
    with Launched(tmp_path, cluster.options(1, 1), **how) as job:
        job.await_output("Epoch 2/")
        cluster.set("alpha:1", "beta:1")
        job.await_event("formed", decision=2)
        _await_two_epochs(job)  # by then the new one has the state as well
        job.kill("w0")
        job.await_event("formed", decision=3)
        _await_two_epochs(job)
        epochs = [int(number) for number in re.findall(r"Epoch (\d+)/", job.output)]
        assert sorted(set(epochs)) == list(range(1, epochs[-1] + 1)), "none is left out"
        accuracies = [float(found) for found in re.findall(r"accuracy: ([\d.]+)", job.output)]
        assert max(accuracies) > 0.9
        job.process.send_signal(signal.SIGINT)  # the workers leave at the next commit
        job.wait()
        assert "worker w1 leaves the job, as it was told to" in job.errors
        job.check_nothing_left()
