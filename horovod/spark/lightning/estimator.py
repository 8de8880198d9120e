"""`TorchEstimator` for Lightning modules, and the `TorchModel` that comes out."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from pyspark import keyword_only

from horovod.spark.common.columns import Rows
from horovod.spark.common.estimator import HorovodEstimator
from horovod.spark.common.job import TrainingJob
from horovod.spark.common.metadata import Metadata
from horovod.spark.common.params import Spec, declare
from horovod.spark.common.prediction import Predict
from horovod.spark.common.util import check_shape_compatibility
from horovod.spark.lightning import remote
from horovod.spark.lightning.legacy import to_lightning_module
from horovod.spark.torch import TorchModel as PlainTorchModel
from horovod.spark.torch.datamodule import as_tensor
from horovod.spark.torch.remote import as_input
from horovod.spark.torch.serialization import PersistentWithOptimizer


@declare(
    Spec("input_shapes", None, "the shape of each feature; -1 stands for the batch"),
    Spec("loss_constructors", None, "functions that make the losses of a plain model"),
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
class TorchEstimator(PersistentWithOptimizer, HorovodEstimator):
    """Trains a Lightning module on the rows of a DataFrame, on many processes.

    The module's steps get a dict of the columns; its `forward` gets one tensor for each of
    `feature_cols`. A plain model with an optimizer and a loss is made a module. The learning rate
    is multiplied by the number of processes while training.
    """

    run_id_prefix = "pytorch"

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
    ) -> None:
        super().__init__()
        self._set_given(self._input_kwargs)

    def _is_module(self) -> bool:
        try:
            remote.flavour_of(self.getModel())
        except ValueError:
            return False
        return True

    def _check_params(self) -> None:
        super()._check_params()
        _require_lightning()
        if self.getTrainMinibatchFn() is not None:
            raise ValueError("train_minibatch_fn is not for Lightning: write it into training_step")
        if self._is_module():
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
        if self.getLoss() is None and self.getLossConstructors() is None:
            raise ValueError("loss is not set, which a plain torch.nn.Module needs")
        if self.getLoss() is not None and self.getLossConstructors() is not None:
            raise ValueError("give loss or loss_constructors, not both")
        weights, labels = self.getLossWeights(), self._checked_labels()
        if weights is not None and len(weights) != len(labels):
            raise ValueError(
                f"there are {len(weights)} loss_weights for {len(labels)} label column(s)"
            )

    def _check_metadata(self, metadata: Metadata) -> None:
        check_shape_compatibility(
            metadata,
            self._features(metadata),
            self._checked_labels(),
            self.getInputShapes(),
            label_shapes=self.getLabelShapes(),
        )

    def _module(self) -> Any:
        if self._is_module():
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
        try:
            return bytes(cloudpickle.dumps({"model": self._module()}))
        except Exception as error:
            if isinstance(error, ValueError):
                raise
            raise ValueError(
                "the model cannot be sent to the processes, because it cannot be pickled: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _trainer(self) -> Callable[[TrainingJob], Any]:
        return remote.train

    def _find_checkpoint(self, path: str, run_id: str) -> bytes | None:
        found = self.getStore().get_checkpoints(run_id)
        return bytes(self.getStore().read(found[-1])) if found else None

    def _model_of(self, result: Any, job: TrainingJob) -> TorchModel:
        module = cloudpickle.loads(job.payload)["model"]
        state = torch.load(io.BytesIO(result["state"]), map_location="cpu", weights_only=True)
        module.load_state_dict(state)
        return TorchModel(
            history=result["history"],
            model=module,
            feature_columns=job.feature_columns,
            input_shapes=self.getInputShapes(),
            label_columns=job.label_columns,
            optimizer=self.getOptimizer(),
            run_id=job.run_id,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
            metadata=job.facts.metadata,
        )


def _require_lightning() -> None:
    from horovod.lightning import flavours

    try:
        flavours.preferred().require()
    except ImportError as error:
        raise RuntimeError(str(error)) from None


class TorchModel(PlainTorchModel):
    """A trained Lightning module, as a Spark ML transformer."""

    def get_prediction_fn(self) -> Callable[[Any, Rows], Any]:
        """What predicts: called with the module and a dict of columns; override it at will."""
        features, shapes = self.getFeatureColumns(), self.getInputShapes()

        def predict(module: Any, rows: Rows) -> Any:
            inputs = [
                as_input(as_tensor(rows[name]), shapes[place] if shapes else None, False)
                for place, name in enumerate(features)
            ]
            return module(*inputs)

        return predict

    def _predictor(self) -> Any:
        return LightningPredictor(self.getModel(), self.get_prediction_fn())


class LightningPredictor:
    """A module and its prediction function, for executors."""

    def __init__(self, module: Any, function: Callable[[Any, Rows], Any]) -> None:
        self._packed = cloudpickle.dumps((module, function))

    def load(self) -> Predict:
        module, function = cloudpickle.loads(self._packed)
        module.cpu().eval()

        def predict(rows: Rows) -> list[Any]:
            with torch.no_grad():
                outputs = function(module, rows)
            found = outputs if isinstance(outputs, (list, tuple)) else [outputs]
            return [output.cpu().numpy() for output in found]

        return predict
