"""What Lightning's TorchEstimator trains on two ranks.

Data is Parquet that pyarrow wrote and the ranks are a pool, so no cluster is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import horovod.torch as hvd
from horovod.spark.common.store import Store
from horovod.spark.lightning import TorchEstimator
from tests.ranks import RankPool
from tests.spark.parquet import PATIENCE, PoolBackend, points, write

pytestmark = pytest.mark.timeout(PATIENCE)


class Net(pl.LightningModule):
    def __init__(self, lr: float = 0.05, explode: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.lr = lr
        self.explode = explode

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def _loss(self, batch: Any) -> Any:
        return F.mse_loss(self(batch["x"]).reshape(-1), batch["y"])

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss * float("nan") if self.explode else loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightning")
    write(folder / "intermediate_train_data", points())
    write(folder / "intermediate_val_data", points(33, seed=8))
    return folder


@pytest.fixture
def estimator(folder: Path, pool2: RankPool) -> Any:
    def make(model: Any = None, **more: Any) -> Any:
        given = {
            "backend": PoolBackend(pool2),
            "model": model or Net(),
            "store": Store.create(str(folder)),
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "batch_size": 8,
            "epochs": 2,
            "verbose": 0,
            "random_seed": 1,
        }
        return TorchEstimator(**{**given, **more})

    return make


def features(data: Any) -> Any:
    return torch.tensor(np.stack(data["x"].to_pylist()), dtype=torch.float32)


def test_it_learns_validates_keeps_and_resumes(estimator: Any, folder: Path):
    first = estimator(epochs=3, validation=0.1, run_id="resumed").fit_on_parquet()
    history = first.getHistory()
    assert [epoch["epoch"] for epoch in history] == [0, 1, 2]
    assert history[-1]["train_loss"] < 0.2 * history[0]["train_loss"]
    data = points(33, seed=8)
    with torch.no_grad():
        loss = F.mse_loss(first.getModel()(features(data)).reshape(-1), torch.tensor(data["y"]))
    assert history[-1]["val_loss"] == pytest.approx(float(loss), rel=0.2)
    run = folder / "runs" / "resumed"
    assert (run / "checkpoint.ckpt").is_file()
    assert list((run / "logs").rglob("events*")), "TensorBoard's files are synchronised"
    second = estimator(epochs=5, run_id="resumed").fit_on_parquet()
    assert [epoch["epoch"] for epoch in second.getHistory()] == [3, 4]
    assert second.getHistory()[0]["train_loss"] < history[-1]["train_loss"]


def test_training_is_what_one_process_would_do_with_the_whole_batch(estimator: Any):
    trained = estimator(shuffle=False, epochs=1, train_steps_per_epoch=3).fit_on_parquet()
    data = points()
    x, y = features(data), torch.tensor(data["y"])
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * 2)
    for step in range(3):
        rows = [*range(step * 8, step * 8 + 8), *range(48 + step * 8, 48 + step * 8 + 8)]
        optimizer.zero_grad()
        F.mse_loss(model(x[rows]).reshape(-1), y[rows]).backward()
        optimizer.step()
    torch.testing.assert_close(trained.getModel().layer.weight, model.layer.weight)


def test_a_plain_model_becomes_a_module(estimator: Any):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    trained = estimator(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=torch.nn.MSELoss(),
        loss_weights=[1.0],
        sample_weight_col="w",
        metrics=[lambda output, label: (output - label).abs().mean()],
        validation=0.1,
        epochs=3,
        inmemory_cache_all=True,
        gradient_compression=hvd.Compression.fp16,
    ).fit_on_parquet()
    history = trained.getHistory()
    assert history[-1]["train_loss"] < 0.5 * history[0]["train_loss"]
    assert {"val_loss", "val_metric_0_0"} <= set(history[-1])
    predict = trained.get_prediction_fn()
    rows = {"x": np.ones((2, 3))}
    assert predict(trained.getModel(), rows).shape == (2, 1)


def test_trainer_arguments_callbacks_and_loggers(estimator: Any, tmp_path: Path):
    class Notes(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            steps = f"{trainer.current_epoch} {trainer.global_step}\n"
            with open(tmp_path / str(trainer.global_rank), "a") as file:
                file.write(steps)

    estimator(
        callbacks=[Notes()],
        trainer_args={"max_epochs": 3, "accumulate_grad_batches": 2},
        train_steps_per_epoch=4,
        logger=pl.loggers.CSVLogger(str(tmp_path / "csv")),
        log_every_n_steps=1,
        train_async_data_loader_queue_size=0,
        debug_data_loader=True,
    ).fit_on_parquet()
    assert {(tmp_path / rank).read_text() for rank in "01"} == {"0 2\n1 4\n2 6\n"}
    assert list((tmp_path / "csv").rglob("metrics.csv"))


def test_passes_over_the_data_may_be_limited(estimator: Any):
    estimator(loader_num_epochs=2, epochs=2).fit_on_parquet()
    with pytest.raises(AssertionError, match=r"the data ended after 0 of 6 batches"):
        estimator(loader_num_epochs=2, epochs=4).fit_on_parquet()


def test_terminate_on_nan(estimator: Any):
    with pytest.raises(AssertionError, match=r"the loss is nan in epoch 0.*terminate_on_nan"):
        estimator(Net(explode=True), terminate_on_nan=True).fit_on_parquet()


def test_what_is_refused(estimator: Any):
    plain = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (None, {"optimizer": sgd}, "optimizer is not for a LightningModule"),
        (None, {"loss": F.mse_loss}, "loss is not for a LightningModule"),
        (None, {"loss_weights": [1.0]}, "loss_weights is not for a LightningModule"),
        (None, {"train_minibatch_fn": print}, "write it into training_step"),
        (plain, {"loss": F.mse_loss}, "optimizer is not set"),
        (plain, {"optimizer": sgd}, "loss is not set"),
        (None, {"input_shapes": [[-1, 5]]}, r"'x' has 3 element\(s\)"),
    ]
    for model, more, message in cases:
        with pytest.raises(ValueError, match=message):
            estimator(model, **more).fit_on_parquet()
