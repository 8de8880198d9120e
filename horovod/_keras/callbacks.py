"""The callbacks for `fit`, without the Keras they belong to.

`horovod.tensorflow.keras.callbacks` and `horovod.keras.callbacks` combine each with the Callback
class of their Keras.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from horovod._keras import learning_rate
from horovod._keras.flavour import backend_of, is_tf_keras
from horovod._keras.optimizer import is_distributed
from horovod._keras.variables import broadcast_model, errors_of
from horovod.common.exceptions import HorovodInternalError
from horovod.common.logging import get_logger
from horovod.common.reduce_op import Average
from horovod.engine.runtime import runtime
from horovod.torch.mpi_ops import allreduce_

logger = get_logger(__name__)


class HorovodCallback:
    """Mixed in before a Keras Callback class."""

    model: Any
    params: dict[str, Any]

    def set_model(self, model: Any) -> None:
        super().set_model(model)  # type: ignore[misc]
        _leave_out_xla(model)


def _leave_out_xla(model: Any) -> None:
    """Train without XLA where Keras would choose it by itself, on TensorFlow with a GPU.

    XLA cannot compile the exchange of gradients. Who asks for it by ``jit_compile=True`` on other
    machines is told so when the step is built.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or is_tf_keras(model) or backend_of(model) != "tensorflow":
        return
    if not is_distributed(optimizer) or not model.jit_compile:
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

    By then everything exists that optimizers make at their first step.

    Args:
        root_rank: The rank whose values all get.
        device: Accepted for compatibility.
        local_variables: These stay what they are on each rank.
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
    TensorBoard. `device` is accepted for compatibility.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            with errors_of(backend_of(self.model)):
                _average(logs)


def _average(logs: dict[str, Any]) -> None:
    metrics = {}
    for name in sorted(logs):
        try:
            metrics[name] = np.array(logs[name], dtype=np.float64)
        except (TypeError, ValueError):
            continue  # not a number
    # The average of what tells the names apart is one's own only if they are all the same.
    mark = float(zlib.crc32("\n".join(metrics).encode()))
    vector = np.concatenate([[mark], *(value.ravel() for value in metrics.values())])
    averages = allreduce_(torch.from_numpy(vector), name="MetricAverage", op=Average).numpy()
    if averages[0] != mark:
        raise HorovodInternalError(
            f"the ranks have different metrics: those of rank {runtime.topology.rank} are "
            f"{', '.join(metrics)}"
        )
    start = 1
    for name, value in metrics.items():
        average = averages[start : start + value.size].reshape(value.shape)
        logs[name] = average if value.ndim else float(average)
        start += value.size


class LearningRateScheduleCallbackBase(HorovodCallback):
    """Sets the learning rate to `initial_lr` times `multiplier(epoch)`.

    Args:
        initial_lr: The rate that the multiplier is for.
        multiplier: A function of the epoch; a number m means m ** (epoch - start_epoch).
        start_epoch: The first epoch that it changes.
        end_epoch: The first that it does not change any more; None: it goes on.
        staircase: Once in each epoch; else for every batch, with fractions of epochs.
        momentum_correction: Scale what momentum has gathered with the rate.
        steps_per_epoch: Needed only where Keras does not know it.

    Raises:
        ValueError: There is no `initial_lr`, or the optimizer's rate is a schedule of its own.
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
        learning_rate.change(
            self.model, self.initial_lr * self.multiplier(epoch), self.momentum_correction
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = learning_rate.current(self.model)


class LearningRateWarmupCallbackBase(LearningRateScheduleCallbackBase):
    """Raises the learning rate from `initial_lr` / size to `initial_lr`, over `warmup_epochs`.

    Args:
        initial_lr: The one that was scaled by the number of ranks; batch by batch it comes nearer.
        warmup_epochs: How many epochs that takes.
        momentum_correction: Scale what momentum has gathered with the rate.
        steps_per_epoch: Needed only where Keras does not know it.
        verbose: Whether to print when it is over.
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
            done = epoch + 1.0 / self.steps_per_epoch  # so that epochs end at round numbers
            size = runtime.topology.size
            return (done * (size - 1) / warmup_epochs + 1) / size

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
            rate = learning_rate.current(self.model)
            print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {rate:g}.")


class BestModelCheckpointBase:
    """Keeps the best model only, in a file named later: set `filepath` before training.

    `monitor`, `verbose`, `mode` and `save_freq` (and `save_weights_only` with tf-keras) are those
    of Keras's ModelCheckpoint. The Spark estimator uses it.
    """

    filepath: Any

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.filepath:
            raise ValueError("BestModelCheckpoint has no file to write: set its filepath first")
        super().on_train_begin(logs)  # type: ignore[misc]
