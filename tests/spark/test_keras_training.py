"""What KerasEstimator trains on two ranks, with Keras 3 and tf-keras.

Data is Parquet that pyarrow wrote and the ranks are a pool, so no cluster is needed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod.spark.common.store import Store
from horovod.spark.keras import KerasEstimator
from horovod.spark.keras.datamodule import NVTabularDataModule
from tests.forked_python import forked_python
from tests.ranks import RankPool
from tests.spark.parquet import PATIENCE, PoolBackend, points, write

pytestmark = pytest.mark.timeout(PATIENCE)

FLAVOURS = {
    "keras": {"KERAS_BACKEND": "tensorflow"},
    "tf_keras": {"TF_USE_LEGACY_KERAS": "1"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keras")
    write(folder / "intermediate_train_data", points())
    write(folder / "intermediate_val_data", points(33, seed=8))
    return folder


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, RankPool]]:
    pools = {name: RankPool(2, env) for name, env in FLAVOURS.items()}
    yield pools
    for pool in pools.values():
        pool.close()


def linear(keras: Any) -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])


@pytest.fixture(params=FLAVOURS)
def keras(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


@pytest.fixture
def estimator(keras: Any, folder: Path, pools: dict[str, RankPool]) -> Any:
    def make(model: Any = None, **more: Any) -> Any:
        given = {
            "backend": PoolBackend(pools[keras.__name__]),
            "model": model or linear(keras),
            "store": Store.create(str(folder)),
            "optimizer": keras.optimizers.SGD(0.05),
            "loss": "mse",
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "batch_size": 8,
            "epochs": 2,
            "verbose": 0,
            "random_seed": 1,
        }
        return KerasEstimator(**{**given, **more})

    return make


def test_it_learns_keeps_and_resumes(estimator: Any, keras: Any, folder: Path):
    name = f"run_{keras.__name__}"
    options: dict[str, Any] = {"run_id": name, "optimizer": keras.optimizers.Adam(0.05)}
    first = estimator(validation=0.2, metrics=["mae"], epochs=4, **options).fit_on_parquet()
    history = first.getHistory()
    assert set(history) >= {"loss", "mae", "val_loss", "val_mae"}
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    model = first.getModel()
    assert float(np.array(model.optimizer.learning_rate)) == pytest.approx(0.05)
    data = points(33, seed=8)
    x = np.array(data["x"].to_pylist(), np.float32)
    loss = float(np.mean((model.predict_on_batch(x)[:, 0] - data["y"]) ** 2))
    assert history["val_loss"][-1] == pytest.approx(loss, rel=0.2)  # a mean of two ranks' means

    run = folder / "runs" / name
    assert (run / "checkpoint").is_file()
    assert list((run / "logs").rglob("events*")), "TensorBoard's files are synchronised"
    second = estimator(epochs=1, **options).fit_on_parquet()
    assert second.getHistory()["loss"][0] < history["loss"][0] * 0.5
    steps = -(-96 // 16)
    assert int(second.getModel().optimizer.iterations) == 5 * steps, "the optimizer's state too"


def test_training_is_what_one_process_would_do_with_the_whole_batch(estimator: Any, keras: Any):
    trained = estimator(shuffle=False, epochs=1, train_steps_per_epoch=3).fit_on_parquet()
    model = linear(keras)
    model.compile(keras.optimizers.SGD(0.05 * 2), "mse")
    data = points()
    x, y = np.array(data["x"].to_pylist(), np.float32), data["y"]
    for step in range(3):
        rows = [*range(step * 8, step * 8 + 8), *range(48 + step * 8, 48 + step * 8 + 8)]
        model.train_on_batch(x[rows], y[rows].reshape(-1, 1))
    for mine, other in zip(trained.getModel().get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def two_heads(keras: Any) -> Any:
    keras.utils.set_random_seed(3)
    x, x0 = keras.layers.Input((3,)), keras.layers.Input((1,))
    hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Concatenate()([x, x0]))
    outputs = [keras.layers.Dense(1)(hidden), keras.layers.Dense(2)(hidden)]
    return keras.Model([x, x0], outputs)


def test_several_inputs_and_outputs_with_weights(estimator: Any, keras: Any):
    trained = estimator(
        two_heads(keras),
        feature_cols=["x", "x0"],
        label_cols=["y", "k"],
        loss=["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)],
        loss_weights=[0.3, 0.7],
        sample_weight_col="w",
        optimizer=keras.optimizers.Adam(0.02),
        epochs=6,
        inmemory_cache_all=True,
    ).fit_on_parquet()
    history = trained.getHistory()
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert trained.getOutputCols() == ["y__output", "k__output"]


def test_inputs_by_name_a_loss_of_ones_own_and_a_checkpoint_callback(
    estimator: Any, keras: Any, folder: Path
):
    keras.utils.set_random_seed(3)
    x0, k = keras.layers.Input((1,), name="x0"), keras.layers.Input((1,), name="k", dtype="int64")
    kind = keras.layers.Flatten()(keras.layers.Embedding(2, 4)(k))
    output = keras.layers.Dense(1)(keras.layers.Concatenate()([x0, kind]))
    model = keras.Model({"x0": x0, "k": k}, output)
    ran = estimator(
        model,
        feature_cols=["x0", "k"],
        continuous_cols=["x0"],
        categorical_cols=["k"],
        data_module=NVTabularDataModule,
        loss=lambda y, guess: (y - guess) ** 2,
        optimizer=keras.optimizers.Adam(0.05),
        epochs=3,
        run_id=f"named_{keras.__name__}",
        checkpoint_callback=keras.callbacks.ModelCheckpoint("x.weights.h5", save_weights_only=True),
    )
    history = ran.fit_on_parquet().getHistory()
    assert history["loss"][-1] < history["loss"][0]
    saved = (folder / "runs" / f"named_{keras.__name__}" / "checkpoint").read_bytes()
    assert saved.startswith(b"\x89HDF")
    again = ran.fit_on_parquet().getHistory()
    assert again["loss"][0] < history["loss"][0]


def test_environment_and_what_is_refused(estimator: Any, keras: Any):
    ran = estimator(epochs=1, train_steps_per_epoch=1)
    ran.fit_on_parquet()
    (environment,) = ran.getBackend().environments
    assert environment["LIBHDFS_OPTS"] == "-Xms2048m -Xmx2048m"
    assert FLAVOURS[keras.__name__].items() <= environment.items()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": "model"}, "model must be a model of Keras"),
        ({"optimizer": None}, "optimizer is not set"),
        ({"loss": None}, "loss is not set"),
        ({"feature_cols": ["x0"]}, r"'x0' has 1 element\(s\).*\(None, 3\)"),
        ({"label_cols": ["y", "k"]}, r"1 output\(s\), but there are 2 label"),
        ({"loss_weights": [1.0, 2.0]}, "2 loss_weights for 1 label"),
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, "has no weights yet"),
    ]
    for more, message in cases:
        with pytest.raises(ValueError, match=message):
            estimator(**more).fit_on_parquet()


def test_keras_on_another_backend(folder: Path):
    """A process has one backend: that of this one is TensorFlow."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*forked_python(), "-m", "tests.spark.keras_program", str(folder)],
        env={**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = map(json.loads, done.stdout.strip().splitlines()[-2:])
    assert first["loss"][-1] < 0.5 * first["loss"][0]
    assert len(first["val_loss"]) == 3
    assert second["loss"][0] < first["loss"][-1]
    assert (first["steps"], second["steps"]) == (36, 72)
