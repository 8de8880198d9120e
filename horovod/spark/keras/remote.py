"""Train on one rank for a `KerasEstimator`: read a share of the rows, fit, report from rank 0."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np

from horovod._keras.flavour import backend_of, is_tf_keras, keras_of
from horovod._keras.variables import optimizer_variables, read_values, write_values
from horovod.spark.common.job import TrainingJob
from horovod.spark.keras.datamodule import PetastormDataModule
from horovod.spark.keras.serialization import (
    keras_named,
    model_from_bytes,
    unpack_model,
    unpack_part,
)
from horovod.spark.task import local_device_index


def train(job: TrainingJob) -> dict[str, Any] | None:
    """Train; rank 0 returns the history, the weights and the optimizer's state."""
    packed = cloudpickle.loads(job.payload)
    keras = keras_named(packed["model"]["keras"], packed["model"]["backend"])
    is_legacy = keras.__name__ == "tf_keras"
    hvd = importlib.import_module("horovod.tensorflow.keras" if is_legacy else "horovod.keras")
    hvd.init()
    return _Training(job, packed, keras, hvd).run()


def compile_model(model: Any, packed: dict[str, Any], optimizer: Any) -> None:
    """Compile a model with its optimizer, losses and metrics."""
    keras = keras_of(model)
    custom = packed["custom_objects"] or {}
    model.compile(
        optimizer=optimizer,
        loss=unpack_part(keras, packed["loss"], custom),
        loss_weights=packed["loss_weights"],
        metrics=unpack_part(keras, packed["metrics"], custom) or None,
    )


class _Training:
    def __init__(self, job: TrainingJob, packed: Any, keras: Any, hvd: Any) -> None:
        self.job, self.packed, self.keras, self.hvd = job, packed, keras, hvd
        if job["random_seed"] is not None:
            keras.utils.set_random_seed(job["random_seed"])
        custom = packed["custom_objects"] or {}
        self.model = unpack_model(packed["model"], custom)
        self.backend = backend_of(self.model)
        _pin_gpu(self.backend, job["use_gpu"], hvd)
        state: list[Any] = []
        if job.checkpoint is not None:
            saved = model_from_bytes(job.checkpoint, self.model, custom)
            if saved is not self.model:
                self.model.set_weights(saved.get_weights())
            state = state_of(saved)
        optimizer = unpack_part(keras, packed["optimizer"], custom)
        restore(optimizer, self.model, state)
        scale_rate(optimizer, packed["learning_rate"], hvd.size())
        options = {"backward_passes_per_step": job["backward_passes_per_step"]}
        if job["gradient_compression"] is not None:
            options["compression"] = job["gradient_compression"]
        compile_model(self.model, packed, hvd.DistributedOptimizer(optimizer, **options))

    def run(self) -> dict[str, Any] | None:
        job, hvd = self.job, self.hvd
        steps = job.train_steps(hvd.size(), whole=False)
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
            job.data_module(hvd.rank(), hvd.size(), steps, PetastormDataModule) as data,
            job.store.get_local_output_dir() as folder,
        ):
            if isinstance(data, PetastormDataModule):
                data.fit_model(*model_shapes(self.model), job["label_shapes"])
            more: dict[str, Any] = {}
            if job.has_validation:
                more["validation_data"] = self._fed(data.val_data())
                more["validation_steps"] = job.val_steps(hvd.size())
            found = self.model.fit(
                self._fed(data.train_data()),
                steps_per_epoch=steps,
                epochs=job["epochs"],
                verbose=2 if job["verbose"] and hvd.rank() == 0 else 0,
                callbacks=self._callbacks(folder, scratch),
                **more,
            )
        if hvd.rank() != 0:
            return None
        history = {name: [float(v) for v in values] for name, values in found.history.items()}
        return {
            "history": history,
            "weights": self.model.get_weights(),
            "optimizer": state_of(self.model),
        }

    def _callbacks(self, folder: str, scratch: str) -> list[Any]:
        hvd, store = self.hvd, self.job.store
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            *(self.job["callbacks"] or ()),
        ]
        if hvd.rank() != 0 or not store.saving_runs:
            return callbacks
        given = self.job["checkpoint_callback"]
        name = "model.weights.h5" if getattr(given, "save_weights_only", False) else "model.keras"
        path = os.path.join(scratch, name)
        if given is None:
            given = self.keras.callbacks.ModelCheckpoint(path)
        given.filepath = path
        callbacks.append(given)
        if self.backend == "tensorflow":
            logs = os.path.join(folder, store.logs_subdir)
            callbacks.append(self.keras.callbacks.TensorBoard(logs, write_graph=False))

        def sync(epoch: int, logs: Any = None) -> None:
            if os.path.exists(path):
                shutil.copyfile(path, os.path.join(folder, store.checkpoint_filename))
            store.sync(folder)

        callbacks.append(self.keras.callbacks.LambdaCallback(on_epoch_end=sync))
        return callbacks

    def _fed(self, batches: Iterator[Any]) -> Any:
        """Return batches in a form for `fit`; TensorFlow compiles a pipeline for them."""
        if self.backend != "tensorflow":
            return (batch for batch in batches)  # Keras wants a generator, not any iterator
        import tensorflow as tf

        first = next(batches)
        signature = tf.nest.map_structure(
            lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), first
        )
        dataset = tf.data.Dataset.from_generator(
            lambda: itertools.chain([first], batches), output_signature=signature
        )
        return dataset.prefetch(self.job["tensorflow_dataset_prefetch_buffer_size"] or 1)


def model_shapes(model: Any) -> tuple[list[tuple[Any, Any]], list[Any], bool]:
    """Return types and shapes of inputs, shapes of outputs, and whether the inputs have names."""
    inputs = [(_dtype(each), tuple(each.shape)[1:]) for each in model.inputs]
    inputs = [(kind, tuple(-1 if s is None else s for s in shape)) for kind, shape in inputs]
    shapes = [tuple(each.shape)[1:] for each in model.outputs]
    outputs = [None if None in shape else shape for shape in shapes]
    try:
        named = isinstance(model.input, dict)
    except AttributeError:  # a Sequential that was never called
        named = False
    return inputs, outputs, named


def _dtype(tensor: Any) -> Any:
    dtype = tensor.dtype
    return np.dtype(dtype if isinstance(dtype, str) else dtype.as_numpy_dtype)


def state_of(model: Any) -> list[Any]:
    """Return the values of the variables of a model's optimizer, the learning rate among them."""
    return read_values(optimizer_variables(getattr(model, "optimizer", None)), model)


def restore(optimizer: Any, model: Any, state: list[Any]) -> None:
    """Give an optimizer for a model the state of another one of its kind, if there is any."""
    if not state:
        return
    optimizer.build(model.trainable_variables)
    variables = optimizer_variables(optimizer)
    if [tuple(v.shape) for v in variables] == [value.shape for value in state]:
        write_values(variables, state, model)


def scale_rate(optimizer: Any, rate: float | None, factor: int) -> None:
    if rate is None:  # a schedule of the optimizer's own
        return
    if is_tf_keras(optimizer):
        keras_of(optimizer).backend.set_value(optimizer.learning_rate, rate * factor)
    else:
        optimizer.learning_rate = rate * factor


def learning_rate_of(optimizer: Any) -> float | None:
    """Return the learning rate; None if it is a schedule."""
    if isinstance(optimizer.get_config().get("learning_rate"), dict):
        return None
    if is_tf_keras(optimizer):
        return float(keras_of(optimizer).backend.get_value(optimizer.learning_rate))
    return float(keras_of(optimizer).ops.convert_to_numpy(optimizer.learning_rate))


def _pin_gpu(backend: str, use_gpu: bool, hvd: Any) -> None:
    if backend == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if gpus and not use_gpu:
            tf.config.set_visible_devices([], "GPU")
        elif gpus:
            gpu = gpus[local_device_index(hvd.local_rank())]
            tf.config.set_visible_devices(gpu, "GPU")
            tf.config.experimental.set_memory_growth(gpu, True)
    elif backend == "torch":
        import torch

        if use_gpu and torch.cuda.is_available():
            torch.cuda.set_device(local_device_index(hvd.local_rank()))
