"""`KerasEstimator` trains a Keras model from a DataFrame, and returns a `KerasModel`."""

from __future__ import annotations

import importlib
from typing import Any

import cloudpickle
import numpy as np
from pyspark import keyword_only

from horovod._keras.flavour import keras_of
from horovod.spark.common.checks import check_shape_compatibility
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.job import TrainingJob
from horovod.spark.common.metadata import Metadata
from horovod.spark.common.params import Spec, declare
from horovod.spark.common.prediction import Predict
from horovod.spark.common.reading.columns import Rows
from horovod.spark.common.serialization import Persistent, decode, pack_for_ranks
from horovod.spark.keras import remote, serialization

PREDICTED_AT_ONCE = 1024  # rows


class PersistentInKeras(Persistent):
    """Saves models, optimizers, losses and metrics the way Keras does; mixed into both classes."""

    def _encode(self, name: str, value: Any) -> Any:
        if name == "model":
            return {"horovod_keras_model": serialization.as_text(value, self.getCustomObjects())}
        if name in ("optimizer", "loss", "metrics") and value is not None:
            keras = keras_of(self.getModel())
            packed = {"keras": keras.__name__, "part": serialization.pack_part(keras, value)}
            return {"horovod_keras_part": super()._encode(name, packed)}
        return super()._encode(name, value)

    def _decode_all(self, values: dict[str, Any]) -> dict[str, Any]:
        custom = decode(values.get("custom_objects")) or {}
        decoded: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, dict) and "horovod_keras_model" in value:
                decoded[name] = serialization.from_text(value["horovod_keras_model"])
            elif isinstance(value, dict) and "horovod_keras_part" in value:
                packed = decode(value["horovod_keras_part"])
                keras = importlib.import_module(packed["keras"])
                decoded[name] = serialization.unpack_part(keras, packed["part"], custom)
            else:
                decoded[name] = decode(value)
        return decoded


@declare(
    Spec("custom_objects", None, "classes and functions that the model is made of, by name"),
    Spec("checkpoint_callback", None, "the ModelCheckpoint to use; its filepath is overwritten"),
    Spec("backend_env", {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"}, "environment of the processes"),
)
class KerasEstimator(PersistentInKeras, HorovodEstimator):
    """Trains a Keras model on the rows of a DataFrame, on many processes.

    Models of Keras 3, on any of its backends, and of tf-keras can be trained. The model gets one
    input for each of `feature_cols` and gives one output for each of `label_cols`.

    Every parameter also has a setter and a getter, such as `setEpochs` and `getEpochs`. The
    learning rate, unless it is a schedule, is multiplied by the number of processes while training.

    Args:
        num_proc: Number of processes. By default as many as Spark runs tasks. Give it or `backend`.
        data_module: Class that reads the data, or its full name as text. By default the
            `PetastormDataModule` of this package, which reads Parquet without Petastorm.
        model: Keras model to train. It is required.
        backend: `Backend` that runs the training. By default a `SparkBackend(num_proc)`.
        store: `Store` for data, checkpoints and logs, such as `Store.create(path)`. It is required.
        custom_objects: Dict from names to the classes and functions that the model is made of. By
            default there are none.
        optimizer: Optimizer, or its name. By default the one that the model was compiled with.
        loss: Loss, or a list with one for each label. By default the one that the model was
            compiled with.
        loss_weights: How much the loss of each label counts. By default all count the same.
        sample_weight_col: Column with the weight of each row. By default all rows count the same.
        gradient_compression: Compressor, such as `hvd.Compression.fp16`. By default none.
        metrics: Metrics to compute, as `compile` takes them. By default there are none.
        feature_cols: Columns that the model is fed with, in the order of its inputs. By default all
            but the labels, the weights and the validation column.
        label_cols: Columns to predict, one for each output of the model. They are required.
        continuous_cols: Feature columns that are numbers, for data modules that ask for them.
        categorical_cols: Feature columns that are categories, for data modules that ask for them.
        validation: Fraction of the rows to validate with, or the name of a column whose true or
            positive values mark such rows. By default there is no validation.
        callbacks: Keras callbacks for `fit` on every process. By default there are none.
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
        train_steps_per_epoch: Number of batches of an epoch on each process. By default all rows.
        validation_steps_per_epoch: Batches of a validation on each process. By default all rows.
        transformation_fn: Function from one pandas DataFrame of rows to another, which runs where
            rows are read. By default rows stay as they are.
        train_reader_num_workers: Number of threads that read rows to train with. The default is 2.
        val_reader_num_workers: Number of threads that read rows to validate with. The default is 2.
        reader_pool_type: Accepted for compatibility and ignored: readers are threads.
        label_shapes: Shape of each label; -1 stands for the batch. By default that of its column.
        checkpoint_callback: `ModelCheckpoint` of your own; its file path is overwritten. By default
            the model is saved after every epoch.
        inmemory_cache_all: Whether each process keeps its rows in memory. The default is False.
        backend_env: Environment of the processes. By default it gives libhdfs 2 GiB of memory.
        use_gpu: Whether to train on GPUs where there are any. The default is True.
        mp_start_method: Accepted for compatibility and ignored: readers are threads.
        tensorflow_dataset_prefetch_buffer_size: Number of batches that TensorFlow reads ahead. The
            default is 0, which reads one ahead.
        nan_labels: What is done with rows that have NaN in a label or weight: "refuse" raises an
            error that counts them, "drop" leaves them out, "keep" uses them. By default "refuse".
        disk_cache: Whether each process keeps decoded rows in a file in Spark's local folders, to
            decode them only once, while a tenth of the disk is free. The default is True.

    Raises:
        ValueError: A value has the wrong type. What is missing or does not fit is found by `fit`,
            before anything is written or started.

    Examples:
        >>> model = KerasEstimator(num_proc=2, store=store, model=net, optimizer="adam", loss="mse",
        ...     feature_cols=["features"], label_cols=["label"]).fit(df)
    """

    run_id_prefix = "keras"
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
        custom_objects: Any = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Any = None,
        sample_weight_col: str | None = None,
        gradient_compression: Any = None,
        metrics: Any = None,
        feature_cols: Any = None,
        label_cols: Any = None,
        continuous_cols: Any = None,
        categorical_cols: Any = None,
        validation: Any = None,
        callbacks: Any = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | None = None,
        random_seed: int | None = None,
        shuffle_buffer_size: int | None = None,
        shuffle: bool = True,
        partitions_per_process: int | None = None,
        run_id: str | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Any = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str = "thread",
        label_shapes: Any = None,
        checkpoint_callback: Any = None,
        inmemory_cache_all: bool = False,
        backend_env: Any = None,
        use_gpu: bool = True,
        mp_start_method: str | None = None,
        tensorflow_dataset_prefetch_buffer_size: int = 0,
        nan_labels: str = "refuse",
        disk_cache: bool = True,
    ) -> None:
        super().__init__()
        self._set_given(self._input_kwargs)

    def _check_params(self) -> None:
        super()._check_params()
        model = self.getModel()
        if not serialization.is_model(model):
            raise ValueError(
                "model must be a model of Keras 3 or tf-keras (tf.keras.Model), "
                f"not {type(model).__name__}"
            )
        if self._optimizer() is None:
            raise ValueError("optimizer is not set, and the model is not compiled with one")
        if self._loss() is None:
            raise ValueError("loss is not set: give a loss, or a list with one for each label")
        if isinstance(self.getLossWeights(), (list, tuple)):  # Keras also takes a dict by name
            self._check_loss_weights()

    def _optimizer(self) -> Any:
        given = self.getOptimizer()
        if given is None:
            return getattr(self.getModel(), "optimizer", None)
        if isinstance(given, str):
            return keras_of(self.getModel()).optimizers.get(given)
        return given

    def _loss(self) -> Any:
        given = self.getLoss()
        return given if given is not None else getattr(self.getModel(), "loss", None)

    def _check_metadata(self, metadata: Metadata) -> None:
        if self.getDataModule() is not None:
            return
        model = self.getModel()
        check_shape_compatibility(
            metadata,
            self._features(metadata),
            self._checked_labels(),
            [tuple(each.shape) for each in model.inputs],
            [tuple(each.shape) for each in model.outputs],
            self.getLabelShapes(),
        )

    def _pack(self) -> bytes:
        model = self.getModel()
        keras = keras_of(model)
        optimizer = self._optimizer()
        parts = {
            "model": serialization.pack_model(model),
            "optimizer": serialization.pack_part(keras, optimizer),
            "learning_rate": remote.learning_rate_of(optimizer),
            "loss": serialization.pack_part(keras, self._loss()),
            "loss_weights": self.getLossWeights(),
            "metrics": serialization.pack_part(keras, self.getMetrics()),
            "custom_objects": self.getCustomObjects(),
        }
        return pack_for_ranks(parts, "custom_objects, loss or metrics", "they")

    def _environment(self) -> dict[str, str]:
        return {**(self.getBackendEnv() or {}), **serialization.environment_of(self.getModel())}

    def _model_of(self, result: Any, job: TrainingJob) -> KerasModel:
        packed = cloudpickle.loads(job.payload)
        keras = keras_of(self.getModel())
        custom = packed["custom_objects"] or {}
        model = serialization.unpack_model(packed["model"], custom)
        model.set_weights(result["weights"])
        optimizer = serialization.unpack_part(keras, packed["optimizer"], custom)
        remote.restore(optimizer, model, result["optimizer"])
        remote.scale_rate(optimizer, packed["learning_rate"], 1)
        remote.compile_model(model, packed, optimizer)
        return KerasModel(
            history=result["history"],
            model=model,
            feature_columns=job.feature_columns,
            label_columns=job.label_columns,
            custom_objects=custom,
            run_id=job.run_id,
            metadata=job.facts.metadata,
        )


@declare(Spec("custom_objects", None, "classes and functions that the model is made of, by name"))
class KerasModel(PersistentInKeras, HorovodModel):
    """A trained Keras model, as a transformer of Spark ML.

    `fit` returns it, and `load` reads a saved one. `transform` adds a column of predictions for
    each label to a DataFrame, named `<label>__output` unless `setOutputCols` names them.

    Args:
        history: Loss and metrics of each epoch of the training.
        model: The trained Keras model.
        feature_columns: Columns that the model is fed with.
        label_columns: Columns that it predicts.
        custom_objects: Dict from names to the classes and functions that the model is made of.
        run_id: Name of the run that trained it.
        metadata: Types and shapes of the columns that it was trained with.
    """

    @keyword_only
    def __init__(
        self,
        *,
        history: Any = None,
        model: Any = None,
        feature_columns: Any = None,
        label_columns: Any = None,
        custom_objects: Any = None,
        run_id: str | None = None,
        metadata: Any = None,
    ) -> None:
        super().__init__()
        self._set_given(self._input_kwargs)

    def _predictor(self) -> Any:
        return KerasPredictor(
            serialization.pack_model(self.getModel()),
            self.getCustomObjects(),
            self.getFeatureColumns(),
        )


class KerasPredictor:
    """A Keras model that is sent to executors, and predicts there."""

    def __init__(self, packed: dict[str, Any], custom_objects: Any, features: list[str]) -> None:
        self._packed = packed
        self._custom = custom_objects or {}
        self._features = features

    def load(self) -> Predict:
        model = serialization.unpack_model(self._packed, self._custom)
        inputs, _, named = remote.model_shapes(model)

        def predict(rows: Rows) -> list[Any]:
            arrays = [
                rows[name].reshape(len(rows[name]), *shape).astype(dtype, copy=False)
                for name, (dtype, shape) in zip(self._features, inputs, strict=True)
            ]
            parts = []
            for start in range(0, len(arrays[0]), PREDICTED_AT_ONCE):
                part: Any = [array[start : start + PREDICTED_AT_ONCE] for array in arrays]
                if named:
                    part = dict(zip(self._features, part, strict=True))
                found = model.predict_on_batch(part if named or len(part) > 1 else part[0])
                parts.append(list(found) if isinstance(found, (list, tuple)) else [found])
            return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]

        return predict
