"""TorchEstimator on a real cluster: what it trains, keeps, resumes and refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from tests.spark.frames import points


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    return points(spark).cache()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Store.create(str(tmp_path_factory.mktemp("store")))


def linear(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 1)


def estimator(store: Any, model: Any = None, **more: Any) -> Any:
    model = model or linear()
    return TorchEstimator(
        **{
            "num_proc": 2,
            "model": model,
            "store": store,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
            "loss": torch.nn.MSELoss(),
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "batch_size": 8,
            "epochs": 2,
            "partitions_per_process": 1,
            "random_seed": 1,
            "verbose": 0,
            **more,
        }
    )


def test_it_learns_validates_and_predicts_as_the_plain_model_does(df: Any, store: Any):
    model = linear()
    before = model.weight.detach().clone()
    trained = estimator(store, model, epochs=6, validation=0.25, run_id="first").fit(df)
    assert torch.equal(model.weight, before), "the given model is left alone"
    history = trained.getHistory()
    assert [epoch["epoch"] for epoch in history] == list(range(6))
    assert history[-1]["train"]["loss"] < 0.2 * history[0]["train"]["loss"]
    assert history[-1]["validation"]["loss"] < history[0]["validation"]["loss"]
    assert trained.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)
    predicted = trained.setOutputCols(["guess"]).transform(df)
    assert predicted.columns == [*df.columns, "guess"]
    assert predicted.schema[: len(df.columns)] == df.schema[:]
    rows = predicted.collect()
    x = torch.tensor(np.array([row.x.toArray() for row in rows]), dtype=torch.float32)
    with torch.no_grad():
        plain = trained.getModel()(x).reshape(-1).double().numpy()
    np.testing.assert_allclose([row.guess for row in rows], plain, rtol=1e-6)
