"""Callbacks for `fit` of Keras 3."""

from __future__ import annotations

import keras

from horovod._keras.callbacks import (
    BestModelCheckpointBase,
    BroadcastGlobalVariablesCallbackBase,
    LearningRateScheduleCallbackBase,
    LearningRateWarmupCallbackBase,
    MetricAverageCallbackBase,
)
from horovod._keras.local_steps import LocalStepsCallbackBase

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalStepsCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(
    BroadcastGlobalVariablesCallbackBase, keras.callbacks.Callback
):
    __doc__ = BroadcastGlobalVariablesCallbackBase.__doc__


class MetricAverageCallback(MetricAverageCallbackBase, keras.callbacks.Callback):
    __doc__ = MetricAverageCallbackBase.__doc__


class LearningRateScheduleCallback(LearningRateScheduleCallbackBase, keras.callbacks.Callback):
    __doc__ = LearningRateScheduleCallbackBase.__doc__


class LearningRateWarmupCallback(LearningRateWarmupCallbackBase, keras.callbacks.Callback):
    __doc__ = LearningRateWarmupCallbackBase.__doc__


class LocalStepsCallback(LocalStepsCallbackBase, keras.callbacks.Callback):
    __doc__ = LocalStepsCallbackBase.__doc__


class BestModelCheckpoint(BestModelCheckpointBase, keras.callbacks.ModelCheckpoint):
    __doc__ = BestModelCheckpointBase.__doc__

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq)
