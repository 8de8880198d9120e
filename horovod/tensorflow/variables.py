"""Reads and writes eager variables as torch tensors, for elastic states of TensorFlow and Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.tensorflow.ops import bridge


def read_variables(variables: Sequence[Any]) -> list[torch.Tensor]:
    """Return views of the variables' memory, also for Keras variables."""
    with tf.device("CPU:0"):  # copies only tensors on other devices
        return [bridge.to_torch(tf.identity(variable)) for variable in variables]


def write_variables(variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    """Assign values to variables, which take over the values' memory."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(bridge.to_tensorflow(value))
