"""Callbacks for `fit` of tf.keras."""

from __future__ import annotations

import tensorflow as tf

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
    BroadcastGlobalVariablesCallbackBase, tf.keras.callbacks.Callback
):
    __doc__ = BroadcastGlobalVariablesCallbackBase.__doc__


class MetricAverageCallback(MetricAverageCallbackBase, tf.keras.callbacks.Callback):
    __doc__ = MetricAverageCallbackBase.__doc__


class LearningRateScheduleCallback(LearningRateScheduleCallbackBase, tf.keras.callbacks.Callback):
    __doc__ = LearningRateScheduleCallbackBase.__doc__


class LearningRateWarmupCallback(LearningRateWarmupCallbackBase, tf.keras.callbacks.Callback):
    __doc__ = LearningRateWarmupCallbackBase.__doc__


class LocalStepsCallback(LocalStepsCallbackBase, tf.keras.callbacks.Callback):
    __doc__ = LocalStepsCallbackBase.__doc__


class BestModelCheckpoint(BestModelCheckpointBase, tf.keras.callbacks.ModelCheckpoint):
    __doc__ = BestModelCheckpointBase.__doc__

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            save_weights_only, monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq
        )
