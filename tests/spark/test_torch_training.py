"""What TorchEstimator trains on two ranks: weights, several labels, resuming, options, errors.

Data is Parquet that pyarrow wrote and the ranks are a pool, so no cluster is needed.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

import horovod.torch as hvd
from horovod.spark.common.backend import Backend
from horovod.spark.common.reading.columns import ColumnError
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from horovod.spark.torch.datamodule import NVTabularDataModule
from tests.ranks import RankPool
from tests.spark.parquet import PATIENCE, PoolBackend, points, write

pytestmark = pytest.mark.timeout(PATIENCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    write(folder / "intermediate_train_data", points())
    write(folder / "intermediate_val_data", points(33, seed=8))
    return folder


@pytest.fixture(scope="module")
def store(folder: Path) -> Any:
    return Store.create(str(folder))


def linear(inputs: int = 3) -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(inputs, 1)


@pytest.fixture
def estimator(store: Any, pool2: RankPool) -> Any:
    def make(model: Any = None, **more: Any) -> Any:
        model = model or linear()
        given = {
            "backend": PoolBackend(pool2),
            "model": model,
            "store": store,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
            "loss": torch.nn.MSELoss(),
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "batch_size": 8,
            "epochs": 2,
            "random_seed": 1,
            "verbose": 0,
        }
        return TorchEstimator(**{**given, **more})

    return make


def features(data: Any) -> Any:
    return torch.tensor(np.stack(data["x"].to_pylist()), dtype=torch.float32)


def losses(model: Any, what: str = "train") -> list[float]:
    return [epoch[what]["loss"] for epoch in model.getHistory()]


def test_training_is_what_one_process_would_do_with_the_whole_batch(estimator: Any, store: Any):
    """Without shuffling, the batches are known: two ranks of 8 rows are one of 16."""
    trained = estimator(shuffle=False, epochs=1, train_steps_per_epoch=3).fit_on_parquet()
    data = points()
    x = features(data)
    y = torch.tensor(data["y"]).reshape(-1, 1)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * 2)
    for step in range(3):
        rows = [*range(step * 8, step * 8 + 8), *range(48 + step * 8, 48 + step * 8 + 8)]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    torch.testing.assert_close(trained.getModel().weight, model.weight)
    torch.testing.assert_close(trained.getModel().bias, model.bias)


def test_validation_sees_every_row_once(estimator: Any, store: Any):
    trained = estimator(validation=0.1, val_batch_size=16, metrics=[mean_error]).fit_on_parquet()
    data = points(33, seed=8)
    with torch.no_grad():
        output = trained.getModel()(features(data))
    y = torch.tensor(data["y"]).reshape(-1, 1)
    last = trained.getHistory()[-1]["validation"]
    assert last["loss"] == pytest.approx(float(torch.nn.functional.mse_loss(output, y)), rel=1e-5)
    assert last["all_metrics"] == [[pytest.approx(float(mean_error(output, y)), rel=1e-5)]]


def mean_error(output: Any, label: Any) -> Any:
    return (output - label).abs().mean()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_it_learns(estimator: Any, cached: bool, shuffle: bool):
    trained = estimator(epochs=8, inmemory_cache_all=cached, shuffle=shuffle).fit_on_parquet()
    assert losses(trained)[-1] < 0.05 * losses(trained)[0]
    assert "validation" not in trained.getHistory()[0], "was not asked for"
    assert trained.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(4, 8)
        self.value = torch.nn.Linear(8, 1)
        self.classes = torch.nn.Linear(8, 2)

    def forward(self, x: Any, x0: Any) -> Any:
        hidden = torch.relu(self.body(torch.cat([x, x0], 1)))
        return self.value(hidden), self.classes(hidden)


def test_several_inputs_outputs_and_loss_weights(estimator: Any):
    model = TwoHeads()
    options = {
        "feature_cols": ["x", "x0"],
        "input_shapes": [[-1, 3], [-1, 1]],
        "label_cols": ["y", "k"],
        "loss": [torch.nn.MSELoss(), torch.nn.CrossEntropyLoss()],
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.02),
        "epochs": 6,
        "metrics": [[mean_error, accuracy]],
    }
    trained = estimator(model, loss_weights=[0.3, 0.7], **options).fit_on_parquet()
    assert losses(trained)[-1] < 0.7 * losses(trained)[0]
    assert trained.getHistory()[-1]["train"]["all_metrics"][0][1] > 0.8
    assert trained.getOutputCols() == ["y__output", "k__output"]
    one_label_only = estimator(model, loss_weights=[1.0, 0.0], **options).fit_on_parquet()
    assert losses(one_label_only) != losses(trained)


def accuracy(output: Any, label: Any) -> Any:
    return (output.argmax(1) == label).float().mean()


@pytest.mark.parametrize(
    "loss",
    [
        {"loss": torch.nn.functional.mse_loss},
        {"loss": torch.nn.MSELoss()},
        {"loss": None, "loss_constructors": torch.nn.MSELoss},
    ],
)
def test_weights_of_rows(estimator: Any, loss: Any):
    trained = estimator(
        shuffle=False, epochs=1, train_steps_per_epoch=1, sample_weight_col="w", **loss
    ).fit_on_parquet()
    data = points()
    rows = [*range(8), *range(48, 56)]
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * 2)
    x = features(data)[rows]
    error = (model(x).reshape(-1) - torch.tensor(data["y"])[rows]) ** 2
    (error * torch.tensor(data["w"])[rows].float()).mean().backward()
    optimizer.step()
    torch.testing.assert_close(trained.getModel().weight, model.weight)


def test_gradients_of_several_batches_are_added_up(estimator: Any):
    summed = estimator(
        shuffle=False, epochs=1, train_steps_per_epoch=2, backward_passes_per_step=2
    ).fit_on_parquet()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * 2)
    data = points()
    x, y = features(data), torch.tensor(data["y"]).reshape(-1, 1)
    for step in range(2):
        rows = [*range(step * 8, step * 8 + 8), *range(48 + step * 8, 48 + step * 8 + 8)]
        torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
    optimizer.step()
    torch.testing.assert_close(summed.getModel().weight, model.weight)


def test_checkpoints_logs_and_resuming(estimator: Any, store: Any, folder: Path):
    model = linear()
    options: dict[str, Any] = {"run_id": "resumed", "shuffle": False}
    options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    first = estimator(model, **options).fit_on_parquet()
    assert first.getRunId() == "resumed"
    run = folder / "runs" / "resumed"
    saved = torch.load(run / "checkpoint", weights_only=True)
    torch.testing.assert_close(saved["model"]["weight"], first.getModel().weight.data)
    log = [json.loads(line) for line in (run / "logs" / "history.jsonl").read_text().splitlines()]
    assert log == first.getHistory()
    assert not list(run.glob(".*")), "nothing half-written is left"
    second = estimator(model, **options).fit_on_parquet()
    assert losses(second)[0] < losses(first)[-1], "it goes on where the first ended"
    momentum = second.getOptimizer().state_dict()["state"][0]["momentum_buffer"]
    assert momentum.abs().sum() > 0
    quiet = Store.create(str(folder), runs_path=str(folder / "no_runs"), save_runs=False)
    estimator(store=quiet, run_id="unsaved").fit_on_parquet()
    assert not (folder / "no_runs").exists()


def test_an_estimator_comes_back_whole(estimator: Any):
    """What the writer keeps, without Spark: the optimizer is still that of the model."""
    made = estimator(epochs=3, shuffle=False)
    kept = {
        p.name: made._encode(p.name, v) for p, v in made._paramMap.items() if p.name != "backend"
    }
    kept = json.loads(json.dumps(kept))
    loaded = TorchEstimator()._set(**made._decode_all(kept)).setBackend(made.getBackend())
    expected = made.fit_on_parquet().getModel().weight
    assert torch.equal(loaded.fit_on_parquet().getModel().weight, expected)
    with pytest.raises(ValueError, match="callbacks cannot be saved"):
        made._encode("callbacks", [threading.Lock()])


def test_compression_callbacks_and_a_minibatch_of_ones_own(estimator: Any, tmp_path: Path):
    class Notes:
        def on_train_begin(self, logs: Any) -> None:
            self.lines = ["begin"]

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.lines.append(f"{epoch} {logs['train']['loss'] > 0}")

        def on_train_end(self, logs: Any) -> None:
            (tmp_path / str(hvd.rank())).write_text(" ".join(self.lines))

    def minibatch(
        model: Any, optimizer: Any, fit_labels: Any, loss_fns: Any, x: Any, y: Any, weights: Any
    ) -> Any:
        optimizer.zero_grad()
        outputs, y = fit_labels(model(*x), y)
        loss = loss_fns[0](outputs[0], y[0])
        loss.backward()
        optimizer.step()
        return outputs, loss

    options = {"shuffle": False, "epochs": 2}
    plain = estimator(**options).fit_on_parquet()
    own = estimator(train_minibatch_fn=minibatch, callbacks=[Notes()], **options).fit_on_parquet()
    torch.testing.assert_close(own.getModel().weight, plain.getModel().weight)
    assert {(tmp_path / rank).read_text() for rank in "01"} == {"begin 0 True 1 True"}
    packed = estimator(gradient_compression=hvd.Compression.fp16, **options).fit_on_parquet()
    # Inside one host nothing is compressed.
    torch.testing.assert_close(packed.getModel().weight, plain.getModel().weight)
    with pytest.raises(AssertionError, match="compression"):
        estimator(gradient_compression="zip", **options).fit_on_parquet()


class Embedded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds = torch.nn.Embedding(2, 4)
        self.out = torch.nn.Linear(4 + 1, 1)

    def forward(self, k: Any, x0: Any) -> Any:
        return self.out(torch.cat([self.kinds(k), x0.reshape(-1, 1)], 1))


@pytest.mark.parametrize("module", [None, NVTabularDataModule])
def test_categorical_columns_are_integers(estimator: Any, module: Any):
    model = Embedded()
    trained = estimator(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        feature_cols=["k", "x0"],
        categorical_cols=["k"],
        continuous_cols=["x0"],
        data_module=module,
        epochs=4,
    ).fit_on_parquet()
    assert losses(trained)[-1] < 0.5 * losses(trained)[0]


def test_transformation_of_text(estimator: Any, tmp_path: Path):
    data = points()
    data["text"] = np.array([f"{value:.6f}" for value in data["x0"]])
    write(tmp_path / "intermediate_train_data", data)

    def parse(frame: Any) -> Any:
        frame["text"] = frame["text"].astype(float)
        return frame

    model = linear(1)
    estimate = estimator(
        model,
        store=Store.create(str(tmp_path)),
        feature_cols=["text"],
        input_shapes=[[-1, 1]],
        transformation_fn=parse,
        epochs=4,
    )
    assert losses(estimate.fit_on_parquet())[-1] > 0
    with pytest.raises(ColumnError, match="column 'text' is of type string"):
        estimate.setTransformationFn(None).fit_on_parquet()


# -- bad input ------------------------------------------------------------------------------------


def test_what_is_refused_before_anything_runs(estimator: Any, pool2: RankPool):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_proc": 2}, "backend or num_proc, not both"),
        ({"store": None}, "store is not set"),
        ({"loss": None}, "loss is not set"),
        ({"loss_constructors": torch.nn.MSELoss}, "loss or loss_constructors, not both"),
        ({"optimizer": None}, "optimizer must be"),
        ({"label_cols": None}, "label_cols is not set"),
        ({"label_cols": ["nope"]}, "no column 'nope'"),
        ({"feature_cols": ["x", "nope"]}, "no column 'nope'"),
        ({"loss_weights": [0.5, 0.5]}, r"2 loss_weights for 1 label"),
        ({"input_shapes": [[-1, 4]]}, r"'x' has 3 element\(s\) in a row.*\(-1, 4\)"),
        ({"input_shapes": [[-1, 3], [-1, 1]]}, r"2 input\(s\).*1 feature"),
        ({"label_shapes": [[-1, 7]]}, r"'y' has 1 element\(s\)"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"epochs": -1}, "epochs must be at least 1"),
        ({"partitions_per_process": 0}, "partitions_per_process must be at least 1"),
        ({"validation": 1.5}, "validation must be at least 0 and less than 1"),
        ({"validation": ["a"]}, "validation must be a fraction"),
        ({"backend": "spark"}, "backend must be"),
    ]
    for more, message in cases:
        given = {**more}
        with pytest.raises(ValueError, match=message):
            estimator(**given).fit_on_parquet()
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module"):
        estimator().setModel("model").fit_on_parquet()
    with pytest.raises(ValueError, match="optimizer has parameters that are not of the model"):
        estimator(optimizer=torch.optim.SGD(linear().parameters(), lr=0.1)).fit_on_parquet()
    with pytest.raises(ValueError, match="model is not set"):
        TorchEstimator().fit_on_parquet()


class Refuses(Backend):
    """Starts nothing: what the driver can know must be said before."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        raise AssertionError("processes were started")

    def num_processes(self) -> int:
        return 2


class OnlyWholeBatches(torch.nn.Linear):
    """Insists on batches of 16 rows."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.reshape(16, 3))


class OnlyOnGpus(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        raise RuntimeError("Found no NVIDIA driver on your system")


def test_a_batch_is_tried_on_the_driver(estimator: Any):
    cross_entropy = torch.nn.CrossEntropyLoss()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (
            torch.nn.Linear(5, 1),
            {},
            r"the model fails with a batch of 'x' \(column of type .*float32 of shape \(8, 3\)\): "
            r"RuntimeError: mat1 and mat2 .*input_shapes.*Nothing was started",
        ),
        (
            torch.nn.Linear(3, 2),
            {"loss": cross_entropy},
            r"the loss fails with the label 'y' .*output float32 of shape \(8, 2\).*"
            r"whole numbers: df.withColumn\('y', df\['y'\].cast\('long'\)\)",
        ),
        (Embedded(), {"feature_cols": ["k", "x0"]}, "the model fails.*categorical_cols"),
        (TwoHeads(), {"feature_cols": ["x", "x0"]}, r"2 output\(s\) for 1 label column"),
        (linear(), {"metrics": [accuracy_of_classes]}, "the metric fails with the label 'y'"),
        (OnlyWholeBatches(3, 1), {"batch_size": 8}, "the model fails"),
    ]
    for model, more, message in cases:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = estimator(model, backend=Refuses(), optimizer=optimizer, **more)
        with pytest.raises(ColumnError, match=message):
            made.fit_on_parquet()
    for model, more in (
        (OnlyWholeBatches(3, 1), {"batch_size": 16}),
        (OnlyOnGpus(3, 1), {}),
        (torch.nn.Linear(3, 2), {"label_cols": ["k"], "loss": cross_entropy}),
        (torch.nn.Linear(1, 1), {"feature_cols": ["x0"]}),
    ):
        before = torch.get_rng_state()
        made = estimator(model, backend=Refuses(), optimizer=_sgd(model), **more)
        with pytest.raises(AssertionError, match="processes were started"):
            made.fit_on_parquet()
        assert torch.equal(before, torch.get_rng_state()), "the user's random numbers"


def _sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def accuracy_of_classes(output: Any, label: Any) -> Any:
    return (output.argmax(1) == label.reshape(3, -1)).float().mean()


def test_numbers_of_any_size_are_classes_and_scalars_are_columns(estimator: Any, tmp_path: Path):
    """Spark's whole numbers are 32 bits wide, and its doubles one number in a row."""
    data = points()
    data["k"] = data["k"].astype(np.int32)
    write(tmp_path / "intermediate_train_data", data)
    model = torch.nn.Linear(1, 2)
    trained = estimator(
        model,
        store=Store.create(str(tmp_path)),
        optimizer=_sgd(model),
        loss=torch.nn.functional.cross_entropy,
        feature_cols=["x0"],
        label_cols=["k"],
    ).fit_on_parquet()
    assert losses(trained)[-1] < losses(trained)[0]


def masked_error(output: Any, label: Any) -> Any:
    known = ~label.isnan()
    return ((output - label)[known] ** 2).mean()


def test_nan_in_a_label(estimator: Any, tmp_path: Path):
    data = points()
    data["y"][90] = np.nan  # behind what the driver looks at
    write(tmp_path / "intermediate_train_data", data)
    made = estimator(store=Store.create(str(tmp_path)))
    with pytest.raises(AssertionError, match=r"column 'y' has NaN in 1 of the \d+ rows"):
        made.fit_on_parquet()
    kept = made.setNanLabels("keep").setLoss(masked_error).fit_on_parquet()
    assert losses(kept)[-1] < losses(kept)[0]
    with pytest.raises(ValueError, match="'drop' needs a DataFrame"):
        made.setNanLabels("drop").fit_on_parquet()
    with pytest.raises(ValueError, match="nan_labels must be one of refuse, drop, keep, not 'x'"):
        made.setNanLabels("x").fit_on_parquet()


def test_a_model_that_cannot_be_pickled(estimator: Any):
    model = linear()
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"model cannot be sent to the processes.*pickle"):
        estimator(model).fit_on_parquet()


def test_no_data_and_no_validation_data(estimator: Any, tmp_path: Path):
    nothing = Store.create(str(tmp_path))
    with pytest.raises(ValueError, match="no complete Parquet data"):
        estimator(store=nothing).fit_on_parquet()
    write(tmp_path / "intermediate_train_data", points())
    with pytest.raises(ValueError, match=r"no Parquet data at .*intermediate_val_data"):
        estimator(store=nothing, validation=0.1).fit_on_parquet()
    (tmp_path / "intermediate_train_data" / "_SUCCESS").unlink()
    (tmp_path / "intermediate_train_data" / "_temporary").mkdir()
    with pytest.raises(ValueError, match="no complete Parquet data"):
        estimator(store=nothing).fit_on_parquet()


def test_a_failing_rank_says_so(estimator: Any):
    class Fails(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            if hvd.rank() == 1:
                raise ArithmeticError("rank 1 cannot count")
            return super().forward(x)

    with pytest.raises(AssertionError, match="rank 1 cannot count"):
        estimator(Fails(3, 1)).fit_on_parquet()


class Memory:
    """A callback that notes by how many MiB the memory of its rank grows while it trains."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = 0

    def on_train_begin(self, logs: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        self._before = self._kibibytes("VmRSS")

    def on_train_end(self, logs: Any) -> None:
        grown = (self._kibibytes("VmHWM") - self._before) / 1024
        (self._folder / f"grown-{hvd.rank()}").write_text(str(grown))

    def _kibibytes(self, what: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)[what].split()[0])


def test_data_larger_than_the_memory_it_takes(estimator: Any, tmp_path: Path):
    """Each rank trains on a row group of 128 MiB and never holds three quarters of it.

    In the file it takes a quarter of that, which must not mislead who decides about buffers.
    """
    rows, width = 128 * 1024, 256
    numbers = np.arange(rows * width, dtype=np.uint8).astype(np.float32) / 256
    lists = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * width, numbers)
    part = pa.table({"x": lists, "y": np.ones(rows, np.float32)})
    for rank in range(2):
        file = tmp_path / "data" / f"part-{rank}.parquet"
        file.parent.mkdir(exist_ok=True)
        parquet.write_table(part, file, row_group_size=rows)
    model = linear(width)
    trained = estimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0001),
        store=Store.create(str(tmp_path / "store"), train_path=str(tmp_path / "data")),
        batch_size=1024,
        epochs=1,
        callbacks=[Memory(tmp_path)],
    ).fit_on_parquet()
    assert losses(trained)[0] < 1
    grown = [float((tmp_path / f"grown-{rank}").read_text()) for rank in range(2)]
    assert max(grown) < 96, grown
