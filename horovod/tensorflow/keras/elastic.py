"""Elastic training with tf.keras: ``hvd.elastic.run``, `KerasState` and the callbacks for `fit`."""

from __future__ import annotations

import tensorflow as tf

from horovod._keras.elastic import (
    CommitStateCallbackBase,
    UpdateBatchStateCallbackBase,
    UpdateEpochStateCallbackBase,
    run,
)
from horovod.tensorflow.elastic import TensorFlowKerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    __doc__ = TensorFlowKerasState.__doc__


class CommitStateCallback(CommitStateCallbackBase, tf.keras.callbacks.Callback):
    __doc__ = CommitStateCallbackBase.__doc__


class UpdateBatchStateCallback(UpdateBatchStateCallbackBase, tf.keras.callbacks.Callback):
    __doc__ = UpdateBatchStateCallbackBase.__doc__


class UpdateEpochStateCallback(UpdateEpochStateCallbackBase, tf.keras.callbacks.Callback):
    __doc__ = UpdateEpochStateCallbackBase.__doc__
