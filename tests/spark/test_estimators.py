"""Estimators on a real cluster: DataFrames in, predictions out, Spark ML's own tools around."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from horovod.spark.common import util
from horovod.spark.common.reading.columns import ColumnError
from horovod.spark.common.store import Store
from horovod.spark.common.util import _write_frame
from horovod.spark.torch import TorchEstimator, TorchModel
from tests.ranks import RankPool
from tests.spark.frames import points
from tests.spark.parquet import PATIENCE, PoolBackend

pytestmark = pytest.mark.timeout(PATIENCE)


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
    given = {
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
    }
    if "backend" in more:
        given.pop("num_proc")
    return TorchEstimator(**{**given, **more})


def check_predictions(trained: Any, df: Any) -> Any:
    """The predictions in the DataFrame are those of the plain model."""
    predicted = trained.setOutputCols(["guess"]).transform(df)
    assert predicted.columns == [*df.columns, "guess"]
    assert predicted.schema[: len(df.columns)] == df.schema[:]
    rows = predicted.collect()
    assert len(rows) == df.count()
    x = torch.tensor(np.array([row.x.toArray() for row in rows]), dtype=torch.float32)
    with torch.no_grad():
        plain = trained.getModel()(x).reshape(-1).double().numpy()
    np.testing.assert_allclose([row.guess for row in rows], plain, rtol=1e-6)
    assert {type(row.x).__name__ for row in rows} == {"DenseVector", "SparseVector"}
    return predicted


def test_torch_from_a_dataframe_on_the_cluster(df: Any, store: Any, tmp_path: Path):
    model = linear()
    before = model.weight.detach().clone()
    made = estimator(store, model, epochs=6, validation=0.25, run_id="first")
    trained = made.fit(df)
    assert torch.equal(model.weight, before), "the given model is left alone"
    history = trained.getHistory()
    assert [epoch["epoch"] for epoch in history] == list(range(6))
    assert history[-1]["train"]["loss"] < 0.2 * history[0]["train"]["loss"]
    assert history[-1]["validation"]["loss"] < history[0]["validation"]["loss"]
    assert store.exists(store.get_checkpoint_path("first"))
    check_predictions(trained, df)
    with pytest.raises(ValueError, match=r"has a column 'x0' already.*setOutputCols"):
        trained.setOutputCols(["x0"]).transform(df)
    with pytest.raises(ValueError, match=r"feature column\(s\) 'x' not in the DataFrame"):
        trained.setOutputCols(["guess"]).transform(df.drop("x"))

    trained.write().overwrite().save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"))
    assert loaded.uid == trained.uid
    assert loaded.getHistory() == history
    check_predictions(loaded, df)
    made.save(str(tmp_path / "estimator"))
    again = TorchEstimator.load(str(tmp_path / "estimator"))
    assert again.getEpochs() == 6
    assert again.getStore().prefix_path == store.prefix_path
    assert torch.equal(again.getModel().weight, before)
    with pytest.raises(ValueError, match=r"holds a horovod.spark.torch"):
        TorchModel.load(str(tmp_path / "estimator"))


def test_outputs_of_several_elements_are_vectors(df: Any):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Softmax(1))
    plain = TorchModel(model=model, feature_columns=["x"], label_columns=["k"])
    rows = plain.transform(df.limit(5)).collect()
    x = torch.tensor(np.array([row.x.toArray() for row in rows]), dtype=torch.float32)
    with torch.no_grad():
        expected = model(x).numpy()
    np.testing.assert_allclose([row.k__output.toArray() for row in rows], expected, rtol=1e-6)
    assert dict(plain.transform(df).dtypes)["k__output"] == "vector"


def test_pipeline_and_cross_validation(df: Any, store: Any, pool2: RankPool, tmp_path: Path):
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    backend = PoolBackend(pool2)  # no time for starting processes seven times
    made = estimator(store, backend=backend, feature_cols=["both"], epochs=1)
    made.setModel(torch.nn.Linear(4, 1))
    made.setOptimizer(torch.optim.SGD(made.getModel().parameters(), lr=0.05))
    assembler = VectorAssembler(inputCols=["x", "x0"], outputCol="both")
    pipeline = Pipeline(stages=[assembler, made])
    fitted = pipeline.fit(df)
    expected = [row.y__output for row in fitted.transform(df).collect()]
    fitted.write().save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    assert [row.y__output for row in loaded.transform(df).collect()] == expected

    grid = ParamGridBuilder().addGrid(made.epochs, [1, 6]).build()
    evaluator = RegressionEvaluator(predictionCol="y__output", labelCol="y")
    search = CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=1
    )
    found = search.fit(df)
    assert found.avgMetrics[1] < found.avgMetrics[0], "six epochs are better than one"
    assert len(found.bestModel.stages[-1].getHistory()) == 6


def test_a_dataframe_is_written_once(df: Any, store: Any, pool2: RankPool):
    backend = PoolBackend(pool2)
    before = len(_datasets(store))
    estimator(store, backend=backend, epochs=1).fit(df)
    once = len(_datasets(store))
    estimator(store, backend=backend, epochs=2).fit(df)
    assert len(_datasets(store)) == once
    estimator(store, backend=backend, validation=0.2).fit(df)
    assert len(_datasets(store)) == once + 1 > before + 1
    util.clear_training_cache()
    estimator(store, backend=backend, epochs=1).fit(df)
    assert len(_datasets(store)) == once + 2


def _datasets(store: Any) -> list[str]:
    names = store.fs.ls(store.get_localized_path(store.prefix_path), detail=False)
    return [name for name in names if "train_data." in name and not name.endswith(".json")]


@pytest.mark.parametrize("compress", [True, False])
def test_validation_by_column_and_vectors_of_both_kinds(
    df: Any, store: Any, pool2: RankPool, compress: bool
):
    backend = PoolBackend(pool2)
    made = estimator(store, backend=backend, validation="val", epochs=3, shuffle=False)
    made.setCompressSparseCols(compress)
    trained = made.fit(df)
    rows = df.filter("val").select("x", "y").collect()
    x = torch.tensor(np.array([row.x.toArray() for row in rows]), dtype=torch.float32)
    y = torch.tensor([row.y for row in rows])
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(trained.getModel()(x).reshape(-1), y)
    assert trained.getHistory()[-1]["validation"]["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert trained.getFeatureColumns() == ["x"]
    assert trained.getMetadata()["x"]["shape"] == [3]


# -- bad input ------------------------------------------------------------------------------------


def test_dataframes_that_are_refused(spark: Any, df: Any, store: Any, pool2: RankPool):
    import pyspark.sql.functions as F

    backend = PoolBackend(pool2)
    before = _datasets(store)
    with_null = df.withColumn("y", F.when(df.x0 > 0, df.y))
    with_nan = df.withColumn("y", F.when(df.x0 > 0, df.y).otherwise(F.lit(float("nan"))))
    nested = F.array(F.array("x0", "y"))
    empty = F.array().cast("array<array<double>>")
    ragged = df.withColumn("a", F.when(df.x0 > 0, nested).otherwise(F.array(F.array("x0"))))
    hollow = df.withColumn("a", F.when(df.x0 > 0, nested).otherwise(empty))
    uneven = df.withColumn("a", F.when(df.x0 > 0, F.array("x0")).otherwise(F.array("x0", "y")))
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (df, {"label_cols": ["nope"]}, ValueError, r"label column\(s\) 'nope' not in the Data"),
        (df, {"feature_cols": ["nope"]}, ValueError, r"feature column\(s\) 'nope' not in the D"),
        (df, {"sample_weight_col": "nope"}, ValueError, "sample_weight_col 'nope' not in"),
        (df, {"validation": "nope"}, ValueError, "validation column 'nope' is not in"),
        (df, {"input_shapes": [[-1, 7]]}, ValueError, r"'x' has 3 element\(s\)"),
        (with_null, {}, ColumnError, r"column 'y' has \d+ null value\(s\)"),
        (with_nan, {}, ColumnError, r"'y' has \d+ row\(s\) with NaN.*nan_labels='drop'"),
        (uneven, {"feature_cols": ["a"]}, ColumnError, "'a' has rows of 1 and of 2 elements"),
        (ragged, {"feature_cols": ["a"]}, ColumnError, "'a' has rows of 1 and of 2 elements"),
        (hollow, {"feature_cols": ["a"]}, ColumnError, "'a' has rows of 0 and of 1 elements"),
        (df.withColumn("a", empty), {"feature_cols": ["a"]}, ColumnError, "without any element"),
        (
            df.withColumn("a", F.lit("text")),
            {"feature_cols": ["a"]},
            ColumnError,
            "'a' is of type string.*StringIndexer",
        ),
        (df, {"feature_cols": ["x0"]}, ColumnError, r"'x0' \(column of type double, .*\(8, 1\)"),
        (
            df.withColumn("never", F.lit(0)),
            {"validation": "never"},
            ValueError,
            "validation='never' leaves no rows",
        ),
        (df.withColumn("t", F.lit("a")), {"validation": "t"}, ValueError, "must be boolean"),
        (df.limit(0), {}, ValueError, "no rows to train with"),
        (df.limit(1), {}, ValueError, r"1 row\(s\) are too few to train on 2 processes"),
    ]
    for frame, more, kind, message in cases:
        with pytest.raises(kind, match=message):
            estimator(store, backend=backend, **more).fit(frame)
    left = set(_datasets(store)) - set(before)
    assert len(left) <= 3, f"what was refused while it was written is removed: {left}"


def test_columns_with_dots_whole_numbers_and_nan(
    df: Any, store: Any, pool2: RankPool, caplog: pytest.LogCaptureFixture
):
    import pyspark.sql.functions as F

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    nan = F.when(df.x0 > 1, F.lit(float("nan"))).otherwise(df.w)
    frame = df.select(df.x0.alias("first.x"), df.k.cast("int").alias("the.k"), nan.alias("w.w"))
    made = estimator(
        store,
        model,
        backend=PoolBackend(pool2),
        feature_cols=["first.x"],
        label_cols=["the.k"],
        sample_weight_col="w.w",
        validation=0.2,
        loss=torch.nn.functional.cross_entropy,
        random_seed=1,
    )
    with pytest.raises(ColumnError, match=r"column 'w.w' has \d+ row\(s\) with NaN"):
        made.fit(frame)
    trained = made.setNanLabels("drop").fit(frame)
    dropped = df.filter(df.x0 > 1).count()
    assert f"leaves out {dropped} row(s) with NaN in the.k, w.w" in caplog.text
    assert np.isfinite(trained.getHistory()[-1]["validation"]["loss"])
    assert trained.transform(frame).select("`the.k__output`").count() == df.count()


def test_a_store_that_cannot_be_written_to(df: Any, tmp_path: Path, pool2: RankPool):
    (tmp_path / "file").touch()
    broken = Store.create(str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match=r"cannot write .*check the rights"):
        estimator(broken, backend=PoolBackend(pool2)).fit(df)


def test_a_store_that_spark_cannot_write_to(df: Any, pool2: RankPool):
    elsewhere = Store.create("memory://estimators/connector")
    with pytest.raises(OSError, match=r"no connector for memory://.*fit_on_parquet"):
        estimator(elsewhere, backend=PoolBackend(pool2)).fit(df)
    with pytest.raises(OSError, match=r"s3a://.*hadoop-aws"):
        _write_frame(df.select("y"), "s3://nobody/nothing", False, 1)


def test_keras_predictions_and_persistence(df: Any, tmp_path: Path):
    keras = pytest.importorskip("keras")
    from horovod.spark.keras import KerasModel

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    made = KerasModel(
        model=model, feature_columns=["x"], label_columns=["k"], history={"loss": [1]}
    )
    made.save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"))
    assert loaded.getHistory() == {"loss": [1]}
    rows = loaded.transform(df.limit(6).coalesce(1)).collect()
    x = np.array([row.x.toArray() for row in rows], np.float32)
    expected = model.predict_on_batch(x)
    np.testing.assert_allclose([r.k__output.toArray() for r in rows], expected, rtol=1e-5)


def test_keras_from_a_dataframe_on_the_cluster(df: Any, store: Any, tmp_path: Path):
    keras = pytest.importorskip("keras")
    from horovod.spark.keras import KerasEstimator

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    made = KerasEstimator(
        num_proc=2,
        model=model,
        store=store,
        optimizer=keras.optimizers.SGD(0.05),
        loss="mse",
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=8,
        epochs=3,
        partitions_per_process=1,
        verbose=0,
    )
    made.save(str(tmp_path / "estimator"))
    history = KerasEstimator.load(str(tmp_path / "estimator")).fit(df).getHistory()
    assert history["loss"][-1] < 0.5 * history["loss"][0]


def test_lightning_from_a_dataframe_on_the_cluster(df: Any, store: Any, tmp_path: Path):
    pytest.importorskip("lightning")
    from horovod.spark.lightning import TorchEstimator as LightningEstimator
    from horovod.spark.lightning import TorchModel as LightningModel
    from tests.spark.test_lightning_training import Net

    trained = LightningEstimator(
        num_proc=2,
        model=Net(),
        store=store,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=8,
        epochs=3,
        partitions_per_process=1,
        verbose=0,
    ).fit(df)
    history = trained.getHistory()
    assert history[-1]["train_loss"] < 0.5 * history[0]["train_loss"]
    trained.save(str(tmp_path / "model"))
    check_predictions(LightningModel.load(str(tmp_path / "model")), df)
