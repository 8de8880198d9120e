"""`TorchEstimator` trains a Lightning module from a DataFrame, and returns a `TorchModel`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from pyspark import keyword_only

from horovod.lightning import flavours
from horovod.spark.common.job import TrainingJob
from horovod.spark.common.params import Spec, declare
from horovod.spark.common.reading.columns import Rows
from horovod.spark.common.serialization import pack_for_ranks
from horovod.spark.lightning import remote
from horovod.spark.lightning.legacy import to_lightning_module
from horovod.spark.torch.datamodule import tensors
from horovod.spark.torch.estimator import ModuleEstimator, TorchPredictor
from horovod.spark.torch.estimator import TorchModel as PlainTorchModel
from horovod.spark.torch.feeding import Feed


@declare(
    Spec("train_minibatch_fn", None, "not with Lightning: this is what training_step does"),
    Spec("trainer_args", None, "further arguments of the Trainer"),
    Spec("num_gpus", None, "GPUs of a process: 1 where there are any, 0 for none"),
    Spec("logger", None, "the logger; TensorBoardLogger if None"),
    Spec("log_every_n_steps", 50, "steps between lines of the log"),
    Spec("loader_num_epochs", None, "passes over the data; without end if None"),
    Spec("terminate_on_nan", False, "whether a loss that is not finite ends the training"),
    Spec("profiler", None, "the Trainer's profiler"),
    Spec("debug_data_loader", False, "whether the loaders say when they make training wait"),
    Spec("train_async_data_loader_queue_size", None, "batches read ahead; 0 is no thread"),
    Spec("val_async_data_loader_queue_size", None, "batches read ahead; 0 is no thread"),
)
class TorchEstimator(ModuleEstimator):
    """Trains a Lightning module on the rows of a DataFrame, on many processes.

    The module's steps get a dict of the columns; its `forward` gets one tensor for each of
    `feature_cols`. A plain `torch.nn.Module` with `optimizer` and `loss` is made a module.
    `LightningEstimator` is another name of this class.

    Every parameter also has a setter and a getter, such as `setEpochs` and `getEpochs`. The
    learning rate is multiplied by the number of processes while training.

    Args:
        num_proc: Number of processes. By default as many as Spark runs tasks. Give it or `backend`.
        model: `LightningModule`, or `torch.nn.Module` with `optimizer` and `loss`. It is required.
        backend: `Backend` that runs the training. By default a `SparkBackend(num_proc)`.
        store: `Store` for data, checkpoints and logs, such as `Store.create(path)`. It is required.
        optimizer: Optimizer of a plain model. A `LightningModule` has its own.
        loss: Loss of a plain model: a function of outputs and labels, or a list with one for each
            label.
        loss_constructors: Functions that make the losses of a plain model in each process, one for
            each label, in place of `loss`.
        metrics: List of metrics of a plain model, each a function of outputs and labels. By default
            there are none.
        loss_weights: How much the loss of each label counts, for a plain model. By default all
            count the same.
        sample_weight_col: Column with the weight of each row. By default all rows count the same.
        gradient_compression: Compressor, such as `hvd.Compression.fp16`. By default none.
        feature_cols: Columns that the model is fed with, in the order of its inputs. By default all
            but the labels, the weights and the validation column.
        input_shapes: Shape of each feature; -1 stands for the batch. By default that of its column.
        validation: Fraction of the rows to validate with, or the name of a column whose true or
            positive values mark such rows. By default there is no validation.
        label_cols: Columns to predict, one for each output of the model. They are required.
        callbacks: Lightning callbacks for the Trainer on every process. By default there are none.
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
        train_minibatch_fn: Refused: this is what `training_step` does.
        train_steps_per_epoch: Number of batches of an epoch on each process. By default all rows.
        validation_steps_per_epoch: Batches of a validation on each process. By default all rows.
        transformation_fn: Function from one pandas DataFrame of rows to another, which runs where
            rows are read. By default rows stay as they are.
        transformation_edit_fields: List of (name, type, shape, nullable) of columns that
            `transformation_fn` changes. By default columns keep what they are.
        transformation_removed_fields: Columns that are dropped after `transformation_fn`. By
            default none are.
        train_reader_num_workers: Number of threads that read rows to train with. The default is 2.
        val_reader_num_workers: Number of threads that read rows to validate with. The default is 2.
        reader_pool_type: Accepted for compatibility and ignored: readers are threads.
        label_shapes: Shape of each label; -1 stands for the batch. By default that of its column.
        inmemory_cache_all: Whether each process keeps its rows in memory. The default is False.
        use_gpu: Whether to train on GPUs where there are any. The default is True.
        mp_start_method: Accepted for compatibility and ignored: readers are threads.
        num_gpus: GPUs of a process; 0 trains on the CPU. By default one is used where there is one.
        logger: Logger of the Trainer. By default a `TensorBoardLogger`, or a `CSVLogger` where
            TensorBoard is not installed.
        log_every_n_steps: Number of steps between lines of the log. The default is 50.
        data_module: Class that reads the data, or its full name as text. By default the
            `PetastormDataModule` of this package, which reads Parquet without Petastorm.
        loader_num_epochs: Number of passes over the data. By default there is no end; with a
            number, it must suffice for `epochs`.
        terminate_on_nan: Whether a loss that is not finite ends the training. The default is False.
        profiler: Profiler of the Trainer. By default there is none.
        debug_data_loader: Whether loaders say when they make training wait. The default is False.
        train_async_data_loader_queue_size: Number of batches of training that a thread reads ahead;
            0 uses no thread. The default is 8.
        val_async_data_loader_queue_size: Number of batches of validation that a thread reads ahead;
            0 uses no thread. The default is 8.
        trainer_args: Dict of arguments of the Trainer, which come before others. By default none.
        nan_labels: What is done with rows that have NaN in a label or weight: "refuse" raises an
            error that counts them, "drop" leaves them out, "keep" uses them. By default "refuse".
        disk_cache: Whether each process keeps decoded rows in a file in Spark's local folders, to
            decode them only once, while a tenth of the disk is free. The default is True.

    Raises:
        ValueError: A value has the wrong type. What is missing or does not fit is found by `fit`,
            before anything is written or started.
    """

    run_id_prefix = "pytorch"
    _trainer = staticmethod(remote.train)

    @keyword_only
    def __init__(
        self,
        *,
        num_proc: int | None = None,
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
        transformation_edit_fields: Any = None,
        transformation_removed_fields: Any = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str | None = None,
        label_shapes: Any = None,
        inmemory_cache_all: bool = False,
        use_gpu: bool = True,
        mp_start_method: str | None = None,
        num_gpus: int | None = None,
        logger: Any = None,
        log_every_n_steps: int = 50,
        data_module: Any = None,
        loader_num_epochs: int | None = None,
        terminate_on_nan: bool = False,
        profiler: Any = None,
        debug_data_loader: bool = False,
        train_async_data_loader_queue_size: int | None = None,
        val_async_data_loader_queue_size: int | None = None,
        trainer_args: dict[str, Any] | None = None,
        nan_labels: str = "refuse",
        disk_cache: bool = True,
    ) -> None:
        super().__init__()
        self._set_given(self._input_kwargs)

    def _check_params(self) -> None:
        super()._check_params()
        try:
            flavours.preferred_flavour().require()
        except ImportError as error:
            raise RuntimeError(str(error)) from None
        if self.getTrainMinibatchFn() is not None:
            raise ValueError("train_minibatch_fn is not for Lightning: write it into training_step")
        if remote.flavour_of(self.getModel()) is not None:
            for name in ("optimizer", "loss", "loss_constructors", "loss_weights"):
                if self.getOrDefault(name) is not None:
                    raise ValueError(
                        f"{name} is not for a LightningModule, which has its own: leave it out"
                    )
            return
        model = self.getModel()
        if not isinstance(model, torch.nn.Module):
            raise ValueError(
                "model must be a LightningModule, or a torch.nn.Module with optimizer and loss, "
                f"not {type(model).__name__}"
            )
        if self.getOptimizer() is None:
            raise ValueError("optimizer is not set, which a plain torch.nn.Module needs")
        self._check_losses()

    def _module(self) -> Any:
        if remote.flavour_of(self.getModel()) is not None:
            return self.getModel()
        if not self.getFeatureCols():
            raise ValueError("feature_cols is not set, which a plain torch.nn.Module needs")
        return to_lightning_module(
            self.getModel(),
            self.getOptimizer(),
            self.getLoss(),
            self.getLossWeights(),
            self.getFeatureCols(),
            self._checked_labels(),
            self.getSampleWeightCol(),
            self.getValidation(),
            loss_constructors=self.getLossConstructors(),
            metrics=self.getMetrics() or (),
            input_shapes=self.getInputShapes(),
            label_shapes=self.getLabelShapes(),
        )

    def _pack(self) -> bytes:
        return pack_for_ranks({"model": self._module()}, "the model")

    def _find_checkpoint(self, path: str, run_id: str) -> bytes | None:
        found = self.getStore().get_checkpoints(run_id)
        return bytes(self.getStore().read(found[-1])) if found else None

    def _model_of(self, result: Any, job: TrainingJob) -> Any:
        module = cloudpickle.loads(job.payload)["model"]
        state = torch.load(io.BytesIO(result["state"]), map_location="cpu", weights_only=True)
        module.load_state_dict(state)
        return self._trained_model(TorchModel, job, result["history"], module, self.getOptimizer())


class TorchModel(PlainTorchModel):
    """A trained Lightning module, as a transformer of Spark ML.

    `fit` returns it, and `load` reads a saved one. `transform` adds a column of predictions for
    each label to a DataFrame, named `<label>__output` unless `setOutputCols` names them.

    Args:
        history: Loss and metrics of each epoch of the training.
        model: The trained `LightningModule`.
        feature_columns: Columns that the model is fed with.
        input_shapes: Shape of each feature; -1 stands for the batch. By default that of its column.
        label_columns: Columns that it predicts.
        optimizer: Optimizer of a plain model that was made a module.
        run_id: Name of the run that trained it.
        loss: Loss that it was trained with.
        loss_constructors: Functions that made the losses it was trained with.
        metadata: Types and shapes of the columns that it was trained with.
        categorical_columns: Not used: the module gets the columns as they are.
    """

    def get_prediction_fn(self) -> Callable[[Any, Rows], Any]:
        """Return the function that predicts; a subclass may return another.

        Returns:
            A function of the module and a dict of columns, which returns the outputs.
        """
        feed = Feed(self.getFeatureColumns(), input_shapes=self.getInputShapes())

        def predict(module: Any, rows: Rows) -> Any:
            as_columns = getattr(module, "takes_columns", False)
            return module(*feed.inputs(tensors(rows), as_columns=as_columns))

        return predict

    def _predictor(self) -> Any:
        return TorchPredictor(self.getModel(), self.get_prediction_fn())
