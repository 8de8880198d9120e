"""Parameters, accessors and defaults of the estimators and models; backends."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from horovod.spark.common.backend import Backend, SparkBackend
from horovod.spark.common.params import EstimatorParams, ModelParams
from horovod.spark.keras import KerasEstimator, KerasModel
from horovod.spark.lightning import TorchEstimator as LightningEstimator
from horovod.spark.torch import TorchEstimator, TorchModel

DEFAULTS = {
    "NumProc": None,
    "Store": None,
    "Backend": None,
    "Model": None,
    "Optimizer": None,
    "Loss": None,
    "LossWeights": None,
    "SampleWeightCol": None,
    "Metrics": [],
    "FeatureCols": None,
    "LabelCols": None,
    "ContinuousCols": None,
    "CategoricalCols": None,
    "Validation": None,
    "GradientCompression": None,
    "CompressSparseCols": False,
    "BatchSize": 32,
    "ValBatchSize": None,
    "Epochs": 1,
    "Verbose": 1,
    "Callbacks": [],
    "RandomSeed": None,
    "ShufflingBufferSize": None,
    "Shuffle": True,
    "PartitionsPerProcess": 10,
    "RunId": None,
    "TrainStepsPerEpoch": None,
    "ValidationStepsPerEpoch": None,
    "TransformationFn": None,
    "TransformationEditFields": None,
    "TransformationRemovedFields": None,
    "TrainReaderNumWorker": 2,
    "ValReaderNumWorker": 2,
    "ReaderPoolType": "thread",
    "LabelShapes": None,
    "InMemoryCacheAll": False,
    "DiskCache": True,  # upstream has none
    "UseGpu": True,
    "MpStartMethod": None,
    "BackwardPassesPerStep": 1,
    "TensorflowDatasetPrefetchBufferSize": 0,
    "DataModule": None,
    "NanLabels": "refuse",  # upstream has none
}

TORCH = {"InputShapes": None, "LossConstructors": None, "TrainMinibatchFn": None}
KERAS = {
    "CustomObjects": None,
    "CheckpointCallback": None,
    "BackendEnv": {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"},
}
LIGHTNING = {
    **TORCH,
    "TrainerArgs": None,
    "NumGpus": None,
    "Logger": None,
    "LogEveryNSteps": 50,
    "LoaderNumEpochs": None,
    "TerminateOnNan": False,
    "Profiler": None,
    "DebugDataLoader": False,
    "TrainAsyncDataLoaderQueueSize": None,
    "ValAsyncDataLoaderQueueSize": None,
}


@pytest.mark.parametrize(
    ("cls", "defaults"),
    [
        (EstimatorParams, DEFAULTS),
        (TorchEstimator, DEFAULTS | TORCH),
        (KerasEstimator, DEFAULTS | KERAS),
        (LightningEstimator, DEFAULTS | LIGHTNING),
    ],
)
@pytest.mark.filterwarnings("ignore:shuffle_buffer_size:DeprecationWarning")
def test_defaults_and_accessors(cls: Any, defaults: dict[str, Any]):
    made = cls()
    assert len(made.params) == len(defaults)
    for name, default in defaults.items():
        assert getattr(made, f"get{name}")() == default, name
        value = {int: 7, bool: True, str: "text"}.get(type(default), 3)
        if name.endswith("Cols") and name != "CompressSparseCols":
            value = ["a", "b"]  # type: ignore[assignment]
        if name in ("SampleWeightCol", "RunId", "MpStartMethod"):
            value = "text"  # type: ignore[assignment]
        if name == "TransformationRemovedFields":
            value = ["a"]  # type: ignore[assignment]
        assert getattr(made, f"set{name}")(value) is made
        assert getattr(made, f"get{name}")() == value, name


@pytest.mark.parametrize("cls", [TorchEstimator, KerasEstimator, LightningEstimator])
def test_every_argument_of_the_constructor_is_a_parameter(cls: Any):
    arguments = set(inspect.signature(inspect.unwrap(cls.__init__)).parameters) - {"self"}
    assert arguments <= {param.name for param in cls().params}
    assert cls(batch_size=5).getBatchSize() == 5
    assert cls(batch_size=None).getBatchSize() == 32
    with pytest.raises(TypeError):
        cls(2)


def test_values_of_a_wrong_type():
    with pytest.raises(ValueError, match="batch_size='many'"):
        TorchEstimator(batch_size="many")
    with pytest.raises(ValueError, match="shuffle"):
        TorchEstimator(shuffle="yes")
    assert TorchEstimator(feature_cols="x").getFeatureCols() == ["x"], "one name is a list of one"


def test_the_shuffling_buffer_is_deprecated():
    with pytest.warns(DeprecationWarning, match="setShuffle"):
        TorchEstimator().setShufflingBufferSize(5)


def test_defaults_are_not_shared():
    first = TorchEstimator()
    first.getCallbacks().append("callback")
    assert TorchEstimator().getCallbacks() == []


@pytest.mark.parametrize("cls", [ModelParams, TorchModel, KerasModel])
def test_models(cls: Any):
    model = cls()
    model.setHistory([1]).setFeatureColumns(["x"]).setLabelColoumns(["y", "z"]).setRunId("r")
    assert model.getHistory() == [1]
    assert model.getFeatureColumns() == ["x"]
    assert model.getLabelColumns() == ["y", "z"]
    assert model.getRunId() == "r"
    assert model.getOutputCols() == ["y__output", "z__output"]
    assert model.setOutputCols(["a", "b"]).getOutputCols() == ["a", "b"]
    assert model.setModel("m").getModel() == "m"


def test_backends(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(TypeError):
        Backend()  # type: ignore[abstract]
    with pytest.raises(ValueError, match="num_proc"):
        SparkBackend(num_proc=0)
    assert SparkBackend(num_proc=3).num_processes() == 3
    calls: list[Any] = []
    monkeypatch.setattr("horovod.spark.run", lambda fn, **more: calls.append((fn, more)) or [1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("ONLY_HERE", "1")
    assert SparkBackend(num_proc=3, verbose=0).run(print, (1,), {"end": ""}, {"A": "1"}) == [1]
    SparkBackend(num_proc=2, env={"B": "2", "CUDA_VISIBLE_DEVICES": "0"}).run(print, env={"A": "1"})
    (fn, first), (_, second) = calls
    assert fn is print
    assert (first["num_proc"], first["args"], first["kwargs"]) == (3, (1,), {"end": ""})
    assert first["verbose"] == 0
    assert (first["env"]["A"], first["env"]["ONLY_HERE"]) == ("1", "1")
    assert "CUDA_VISIBLE_DEVICES" not in first["env"]
    assert second["env"] == {"A": "1", "B": "2", "_HOROVOD_TORCH_VERSION_SAID": "1"}
