"""Elastic training with Keras: ``hvd.elastic.run``, `KerasState` and the callbacks for `fit`."""

from __future__ import annotations

import keras

from horovod._keras.elastic import (
    CommitStateCallbackBase,
    KerasStateBase,
    UpdateBatchStateCallbackBase,
    UpdateEpochStateCallbackBase,
    run,
)

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(KerasStateBase):
    __doc__ = KerasStateBase.__doc__


class CommitStateCallback(CommitStateCallbackBase, keras.callbacks.Callback):
    __doc__ = CommitStateCallbackBase.__doc__


class UpdateBatchStateCallback(UpdateBatchStateCallbackBase, keras.callbacks.Callback):
    __doc__ = UpdateBatchStateCallbackBase.__doc__


class UpdateEpochStateCallback(UpdateEpochStateCallbackBase, keras.callbacks.Callback):
    __doc__ = UpdateEpochStateCallbackBase.__doc__
