"""The callbacks for `fit`, as mixins that belong to no particular Keras.

`horovod.tensorflow.keras.callbacks` and `horovod.keras.callbacks` combine each with the Callback
class of their Keras.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from horovod._keras.flavour import backend_of, is_tf_keras, keras_of
from horovod._keras.optimizer import distribution_of
from horovod._keras.variables import broadcast_model, raise_errors_of
from horovod.common.exceptions import HorovodInternalError
from horovod.common.logging import get_logger
from horovod.common.reduce_op import Average
from horovod.engine.runtime import runtime
from horovod.torch.mpi_ops import allreduce_

logger = get_logger(__name__)


class HorovodCallback:
    """The base of our callbacks, mixed in before a Keras Callback class."""

    model: Any
    params: dict[str, Any]

    def set_model(self, model: Any) -> None:
        super().set_model(model)  # type: ignore[misc]
        _disable_xla(model)


def _disable_xla(model: Any) -> None:
    """Train without XLA where Keras would choose it by itself, on TensorFlow with a GPU.

    XLA cannot compile the exchange of gradients. A program that asks for ``jit_compile=True`` on
    other machines gets an error when the step is built.
    """
    if is_tf_keras(model) or backend_of(model) != "tensorflow":
        return
    if distribution_of(getattr(model, "optimizer", None)) is None or not model.jit_compile:
        return
    if model._resolve_auto_jit_compile():
        model.jit_compile = False
        model.train_function = None
        logger.warning(
            "XLA is switched off for %s, because it cannot compile the exchange of gradients: "
            "compile(jit_compile=False) says the same",
            model.name,
        )


class BroadcastGlobalVariablesCallbackBase(HorovodCallback):
    """Gives all ranks the model and the optimizer state of `root_rank`, after the first batch.

    Optimizers make some of their variables in their first step, so they all exist by then.

    Args:
        root_rank: The rank whose values all ranks get.
        device: Accepted for compatibility.
        local_variables: Variables that keep their own values on each rank; none by default.

    Raises:
        ValueError: `local_variables` contains something that is not a variable.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local_variables = list(local_variables or ())
        for variable in self._local_variables:
            if not hasattr(variable, "assign"):
                raise ValueError(
                    f"local_variables must be variables, not {type(variable).__name__}"
                )

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        broadcast_model(self.model, self.root_rank, self._local_variables)
        self.broadcast_done = True


class MetricAverageCallbackBase(HorovodCallback):
    """Averages the metrics of an epoch over all ranks, in one exchange.

    Put it before callbacks that use metrics, such as ReduceLROnPlateau, EarlyStopping or
    TensorBoard.

    Args:
        device: Accepted for compatibility.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            with raise_errors_of(backend_of(self.model)):
                _average(logs)


def _average(logs: dict[str, Any]) -> None:
    """Replace all numbers in `logs` by their averages over the ranks. Collective."""
    metrics = {}
    for name in sorted(logs):
        try:
            metrics[name] = np.array(logs[name], dtype=np.float64)
        except (TypeError, ValueError):
            continue  # not a number
    # A checksum of the metrics' names travels with the values: its average is equal to this rank's
    # checksum only if all ranks have the same names.
    checksum = float(zlib.crc32("\n".join(metrics).encode()))
    vector = np.concatenate([[checksum], *(value.ravel() for value in metrics.values())])
    averages = allreduce_(torch.from_numpy(vector), name="MetricAverage", op=Average).numpy()
    if averages[0] != checksum:
        raise HorovodInternalError(
            f"the ranks have different metrics: those of rank {runtime.topology.rank} are "
            f"{', '.join(metrics)}"
        )
    start = 1
    for name, value in metrics.items():
        average = averages[start : start + value.size].reshape(value.shape)
        logs[name] = average if value.ndim else float(average)
        start += value.size


def _read_rate(model: Any) -> float:
    """Return the learning rate of the model's optimizer."""
    optimizer = model.optimizer
    if is_tf_keras(optimizer):
        return float(keras_of(optimizer).backend.get_value(optimizer.learning_rate))
    return float(keras_of(optimizer).ops.convert_to_numpy(optimizer.learning_rate))


def _change_rate(model: Any, rate: float, momentum_correction: bool) -> None:
    """Set the learning rate; with `momentum_correction` also scale the accumulated momentum.

    In Keras the accumulated momentum v contains the learning rate: v = m * v - rate * gradient.
    After a change of the rate, v still has the scale of the old rate. Scaling v has the same effect
    as scaling m for one step, which is not possible: m is a constant of the compiled step.
    """
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if callable(getattr(inner, "_learning_rate", None)):
        raise ValueError(
            "the optimizer's learning rate is a schedule of its own, so that a callback cannot set "
            "it: give the optimizer a number"
        )
    keras = keras_of(optimizer)
    before = _read_rate(model)
    if is_tf_keras(optimizer):
        keras.backend.set_value(optimizer.learning_rate, rate)
    else:
        optimizer.learning_rate = rate
    if momentum_correction and before > 0 and rate != before:
        factor = rate / before
        for variable in _momentum_variables(inner):
            if is_tf_keras(optimizer):
                value = keras.backend.get_value(variable)
                keras.backend.set_value(variable, value * value.dtype.type(factor))
            else:
                variable.assign(keras.ops.multiply(variable, factor))


def _momentum_variables(optimizer: Any) -> list[Any]:
    """Return the variables that accumulate momentum; none if the optimizer has no such option."""
    slots = getattr(optimizer, "_slots", None)
    if isinstance(slots, dict):  # tf_keras.optimizers.legacy
        return [each["momentum"] for each in slots.values() if "momentum" in each]
    if not hasattr(optimizer, "momentum"):
        return []
    momentums = (
        getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    )
    return [variable for variable in momentums if variable is not None]


class LearningRateScheduleCallbackBase(HorovodCallback):
    """Sets the learning rate to `initial_lr` times `multiplier(epoch)`.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A function of the epoch; a number m stands for m ** (epoch - start_epoch).
        start_epoch: The first epoch whose rate is set; 0 by default.
        end_epoch: The first epoch whose rate is not set any more; None (the default) for no end.
        staircase: Whether to set the rate once in each epoch (the default). Otherwise it is set for
            every batch, and `multiplier` gets fractions of epochs.
        momentum_correction: Whether to scale accumulated momentum with the rate; True by default.
        steps_per_epoch: The number of batches in an epoch, needed only where Keras does not know.

    Raises:
        ValueError: There is no `initial_lr`, or the optimizer has a learning rate schedule.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is needed: the learning rate that the multiplier is for")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = multiplier
            self.staircase = True
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self._steps()

    def _steps(self) -> int:
        """Return the number of steps in an epoch, from what Keras tells its callbacks."""
        if self.params.get("steps"):
            return int(self.params["steps"])
        if self.params.get("samples") and self.params.get("batch_size"):
            return int(self.params["samples"] // self.params["batch_size"])
        raise ValueError(
            f"Keras does not know how many steps an epoch has: pass steps_per_epoch to "
            f"{type(self).__name__}"
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(epoch)

    def _adjust(self, epoch: float) -> None:
        rate = self.initial_lr * self.multiplier(epoch)
        _change_rate(self.model, rate, self.momentum_correction)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = _read_rate(self.model)


class LearningRateWarmupCallbackBase(LearningRateScheduleCallbackBase):
    """Raises the learning rate from `initial_lr` / size to `initial_lr`, over `warmup_epochs`.

    Args:
        initial_lr: The final learning rate, already scaled by the number of ranks. The rate
            approaches it batch by batch.
        warmup_epochs: The number of epochs that this takes; 5 by default.
        momentum_correction: Whether to scale accumulated momentum with the rate; True by default.
        steps_per_epoch: The number of batches in an epoch, needed only where Keras does not know.
        verbose: 1 to print a line when the warm-up is over; 0 by default.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            progress = epoch + 1.0 / self.steps_per_epoch  # an integer after an epoch's last batch
            size = runtime.topology.size
            return (progress * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = _read_rate(self.model)
            print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {rate:g}.")


class BestModelCheckpointBase:
    """Saves only the best model, in the file `filepath`, which must be set before training.

    The Spark estimator uses it. The arguments `monitor`, `verbose`, `mode` and `save_freq`, and
    `save_weights_only` in `horovod.tensorflow.keras`, are those of Keras's ModelCheckpoint.
    """

    filepath: Any

    def __init__(self, save_weights_only: bool = False, **options: Any) -> None:
        super().__init__(  # type: ignore[call-arg]
            # Keras requires a name, which is removed below.
            "best.weights.h5" if save_weights_only else "best.keras",
            save_best_only=True,
            save_weights_only=save_weights_only,
            **options,
        )
        self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.filepath:
            raise ValueError("BestModelCheckpoint has no file to write: set its filepath first")
        super().on_train_begin(logs)  # type: ignore[misc]
