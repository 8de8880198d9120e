"""`TorchEstimator` trains a PyTorch model from a DataFrame, and returns a `TorchModel`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from pyspark import keyword_only

from horovod.spark.common.checks import check_shape_compatibility
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.job import TrainingJob
from horovod.spark.common.metadata import Metadata
from horovod.spark.common.params import Spec, declare
from horovod.spark.common.prediction import Predict
from horovod.spark.common.reading.columns import Rows
from horovod.spark.common.serialization import Persistent, decode, encode, pack_for_ranks
from horovod.spark.torch import remote
from horovod.spark.torch.datamodule import tensors
from horovod.spark.torch.feeding import Feed
from horovod.spark.torch.trial import Trial

_WITH_MODEL = {"horovod_torch": "with the model"}


class PersistentWithOptimizer(Persistent):
    """Saves a model and its optimizer together; mixed into the classes that have both."""

    def _encode(self, name: str, value: Any) -> Any:
        if name == "model":
            both = {"model": value, "optimizer": self.getOrDefault("optimizer")}
            return encode("the model or its optimizer", both)
        if name == "optimizer":
            return _WITH_MODEL
        return super()._encode(name, value)

    def _decode_all(self, values: dict[str, Any]) -> dict[str, Any]:
        found = {name: decode(value) for name, value in values.items() if value != _WITH_MODEL}
        if "model" in found:
            both = found.pop("model")
            found.update({name: part for name, part in both.items() if part is not None})
        return found


@declare(
    Spec("input_shapes", None, "the shape of each feature; -1 stands for the batch"),
    Spec("loss_constructors", None, "functions that make the losses; excludes loss"),
)
class ModuleEstimator(PersistentWithOptimizer, HorovodEstimator):
    """Base class of the estimators for PyTorch and for Lightning."""

    def _check_losses(self) -> None:
        loss, constructors = self.getLoss(), self.getLossConstructors()
        if loss is not None and constructors is not None:
            raise ValueError("give loss or loss_constructors, not both")
        if loss is None and constructors is None:
            raise ValueError("loss is not set: give a function of outputs and labels")
        self._check_loss_weights()
        labels = self._checked_labels()
        for name in ("loss", "loss_constructors"):
            given = self.getOrDefault(name)
            if isinstance(given, (list, tuple)) and len(given) not in (1, len(labels)):
                raise ValueError(f"there are {len(given)} {name} for {len(labels)} label column(s)")

    def _check_metadata(self, metadata: Metadata) -> None:
        check_shape_compatibility(
            metadata,
            self._features(metadata),
            self._checked_labels(),
            self.getInputShapes(),
            label_shapes=self.getLabelShapes(),
        )

    def _trained_model(
        self, cls: type[TorchModel], job: TrainingJob, history: Any, model: Any, optimizer: Any
    ) -> Any:
        return cls(
            history=history,
            model=model,
            feature_columns=job.feature_columns,
            input_shapes=self.getInputShapes(),
            label_columns=job.label_columns,
            optimizer=optimizer,
            run_id=job.run_id,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
            metadata=job.facts.metadata,
            categorical_columns=self.getCategoricalCols(),
        )


@declare(
    Spec("train_minibatch_fn", None, "computes outputs and loss of a batch and makes the step")
)
class TorchEstimator(ModuleEstimator):
    """Trains a PyTorch model on the rows of a DataFrame, on many processes.

    The model is called with one tensor for each of `feature_cols`: floats, or integers for those in
    `categorical_cols`. It returns one output for each of `label_cols`.

    Every parameter also has a setter and a getter, such as `setEpochs` and `getEpochs`. The
    learning rate is multiplied by the number of processes while training.

    Args:
        num_proc: Number of processes. By default as many as Spark runs tasks. Give it or `backend`.
        data_module: Class that reads the data, or its full name as text. By default the
            `PetastormDataModule` of this package, which reads Parquet without Petastorm.
        model: `torch.nn.Module` to train. It is required.
        backend: `Backend` that runs the training. By default a `SparkBackend(num_proc)`.
        store: `Store` for data, checkpoints and logs, such as `Store.create(path)`. It is required.
        optimizer: Optimizer of the model's parameters. It is required.
        loss: Function of outputs and labels, or a list with one for each label. Give it or
            `loss_constructors`.
        loss_constructors: Functions that make the losses in each process, one for each label, in
            place of `loss`.
        metrics: List of functions of outputs and labels; an entry may be a list with one function
            for each label. By default there are none.
        loss_weights: How much the loss of each label counts. By default all count the same.
        sample_weight_col: Column with the weight of each row. By default all rows count the same.
        gradient_compression: Compressor, such as `hvd.Compression.fp16`. By default none.
        feature_cols: Columns that the model is fed with, in the order of its inputs. By default all
            but the labels, the weights and the validation column.
        continuous_cols: Feature columns that are numbers, for data modules that ask for them.
        categorical_cols: Feature columns that the model gets as integers.
        input_shapes: Shape of each feature; -1 stands for the batch. By default that of its column.
        validation: Fraction of the rows to validate with, or the name of a column whose true or
            positive values mark such rows. By default there is no validation.
        label_cols: Columns to predict, one for each output of the model. They are required.
        callbacks: Objects with any of the methods `on_train_begin`, `on_epoch_begin`,
            `on_epoch_end` and `on_train_end`. By default there are none.
        batch_size: Number of rows in a batch of one process. The default is 32.
        val_batch_size: Number of rows in a batch of validation. By default `batch_size`.
        epochs: Number of epochs to train. The default is 1.
        verbose: How much is printed; 0 is nothing. The default is 1.
        random_seed: Seed of shuffling, of validation rows and of the framework. By default random.
        shuffle_buffer_size: Deprecated: number of rows to shuffle among. By default as many as fit
            into 24 MiB; 0 does not shuffle.
        shuffle: Whether to shuffle the rows of training. The default is True.
        partitions_per_process: Number of Parquet files for each process. The default is 10.
        run_id: Name of the run, which goes on from a checkpoint of that name. By default a new one.
        train_minibatch_fn: Function that computes outputs and loss of one batch and makes the step,
            in place of the usual one. It is called with the model, the optimizer, a function that
            brings outputs and labels into one form, the losses, inputs, labels and weights.
        train_steps_per_epoch: Number of batches of an epoch on each process. By default all rows.
        validation_steps_per_epoch: Batches of a validation on each process. By default all rows.
        transformation_fn: Function from one pandas DataFrame of rows to another, which runs where
            rows are read. By default rows stay as they are.
        train_reader_num_workers: Number of threads that read rows to train with. The default is 2.
        val_reader_num_workers: Number of threads that read rows to validate with. The default is 2.
        reader_pool_type: Accepted for compatibility and ignored: readers are threads.
        label_shapes: Shape of each label; -1 stands for the batch. By default that of its column.
        inmemory_cache_all: Whether each process keeps its rows in memory. The default is False.
        use_gpu: Whether to train on GPUs where there are any. The default is True.
        mp_start_method: Accepted for compatibility and ignored: readers are threads.
        backward_passes_per_step: Batches whose gradients make one step. The default is 1.
        nan_labels: What is done with rows that have NaN in a label or weight: "refuse" raises an
            error that counts them, "drop" leaves them out, "keep" uses them. By default "refuse".
        disk_cache: Whether each process keeps decoded rows in a file in Spark's local folders, to
            decode them only once, while a tenth of the disk is free. The default is True.

    Raises:
        ValueError: A value has the wrong type. What is missing or does not fit is found by `fit`,
            before anything is written or started.

    Examples:
        >>> model = TorchEstimator(num_proc=2, store=store, model=net, optimizer=sgd, loss=mse,
        ...     feature_cols=["features"], label_cols=["label"]).fit(df)
    """

    run_id_prefix = "pytorch"
    _trainer = staticmethod(remote.train)

    @keyword_only
    def __init__(
        self,
        *,
        num_proc: int | None = None,
        data_module: Any = None,
        model: Any = None,
        backend: Any = None,
        store: Any = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_constructors: Any = None,
        metrics: Any = None,
        loss_weights: Any = None,
        sample_weight_col: str | None = None,
        gradient_compression: Any = None,
        feature_cols: Any = None,
        continuous_cols: Any = None,
        categorical_cols: Any = None,
        input_shapes: Any = None,
        validation: Any = None,
        label_cols: Any = None,
        callbacks: Any = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int = 1,
        random_seed: int | None = None,
        shuffle_buffer_size: int | None = None,
        shuffle: bool = True,
        partitions_per_process: int | None = None,
        run_id: str | None = None,
        train_minibatch_fn: Any = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Any = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str = "thread",
        label_shapes: Any = None,
        inmemory_cache_all: bool = False,
        use_gpu: bool = True,
        mp_start_method: str | None = None,
        backward_passes_per_step: int = 1,
        nan_labels: str = "refuse",
        disk_cache: bool = True,
    ) -> None:
        super().__init__()
        self._set_given(self._input_kwargs)

    def _check_params(self) -> None:
        super()._check_params()
        model, optimizer = self.getModel(), self.getOptimizer()
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                "optimizer must be a torch.optim.Optimizer of the model's parameters, "
                f"not {optimizer!r}"
            )
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "the optimizer has parameters that are not of the model: make it with "
                "model.parameters()"
            )
        self._check_losses()
        if self.getTrainMinibatchFn() is not None and self.getBackwardPassesPerStep() > 1:
            raise ValueError(
                "train_minibatch_fn makes the steps itself, so backward_passes_per_step must be 1"
            )

    def _try_rows(self, rows: Rows, metadata: Metadata, payload: bytes) -> None:
        if self.getTrainMinibatchFn() is not None:
            return  # it may call the model and the losses in other ways
        feed = Feed(
            self._features(metadata),
            self._checked_labels(),
            self.getSampleWeightCol(),
            self.getInputShapes(),
            self.getLabelShapes(),
            frozenset(self.getCategoricalCols() or ()),
        )
        kinds = {name: str(facts["spark_data_type"]) for name, facts in metadata.items()}
        Trial(payload, feed, kinds, self.getMetrics(), self.getBatchSize()).run(rows)

    def _pack(self) -> bytes:
        parts = {
            "model": self.getModel(),
            "optimizer": self.getOptimizer(),
            "loss": self.getLoss(),
            "loss_constructors": self.getLossConstructors(),
        }
        for name, part in parts.items():
            pack_for_ranks(part, f"the {name}")
        return bytes(cloudpickle.dumps(parts))  # together, so the optimizer keeps its parameters

    def _model_of(self, result: Any, job: TrainingJob) -> Any:
        state = torch.load(io.BytesIO(result["state"]), map_location="cpu", weights_only=True)
        packed = cloudpickle.loads(job.payload)  # the user's own model stays as it was
        model, optimizer = packed["model"].cpu(), packed["optimizer"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return self._trained_model(TorchModel, job, result["history"], model, optimizer)


@declare(
    Spec("optimizer", None, "the optimizer, with its state"),
    Spec("input_shapes", None, "the shape of each feature; -1 stands for the batch"),
    Spec("loss", None, "the loss it was trained with"),
    Spec("loss_constructors", None, "what made the losses it was trained with"),
    Spec("categorical_columns", None, "the features that the model gets as integers"),
)
class TorchModel(PersistentWithOptimizer, HorovodModel):
    """A trained PyTorch model, as a transformer of Spark ML.

    `fit` returns it, and `load` reads a saved one. `transform` adds a column of predictions for
    each label to a DataFrame, named `<label>__output` unless `setOutputCols` names them.

    Args:
        history: Loss and metrics of each epoch of the training.
        model: The trained `torch.nn.Module`.
        feature_columns: Columns that the model is fed with.
        input_shapes: Shape of each feature; -1 stands for the batch. By default that of its column.
        label_columns: Columns that it predicts.
        optimizer: The optimizer with its state.
        run_id: Name of the run that trained it.
        loss: Loss that it was trained with.
        loss_constructors: Functions that made the losses it was trained with.
        metadata: Types and shapes of the columns that it was trained with.
        categorical_columns: Features that the model gets as integers.
    """

    @keyword_only
    def __init__(
        self,
        *,
        history: Any = None,
        model: Any = None,
        feature_columns: Any = None,
        input_shapes: Any = None,
        label_columns: Any = None,
        optimizer: Any = None,
        run_id: str | None = None,
        loss: Any = None,
        loss_constructors: Any = None,
        metadata: Any = None,
        categorical_columns: Any = None,
    ) -> None:
        super().__init__()
        self._set_given(self._input_kwargs)

    def _predictor(self) -> Any:
        feed = Feed(
            self.getFeatureColumns(),
            input_shapes=self.getInputShapes(),
            categorical=frozenset(self.getCategoricalColumns() or ()),
        )

        def predict(model: Any, rows: Rows) -> Any:
            return model(*feed.inputs(tensors(rows)))

        return TorchPredictor(self.getModel(), predict)


class TorchPredictor:
    """A PyTorch model and the function of model and rows that predicts, for executors."""

    def __init__(self, model: Any, function: Callable[[Any, Rows], Any]) -> None:
        self._packed = cloudpickle.dumps((model, function))

    def load(self) -> Predict:
        model, function = cloudpickle.loads(self._packed)
        model.cpu().eval()

        def predict(rows: Rows) -> list[Any]:
            with torch.no_grad():
                outputs = function(model, rows)
            found = outputs if isinstance(outputs, (list, tuple)) else [outputs]
            return [output.cpu().numpy() for output in found]

        return predict
