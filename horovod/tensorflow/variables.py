"""The values of eager variables as torch tensors, for elastic states of TensorFlow and of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from horovod.tensorflow import bridge


def read_variables(variables: Sequence[Any]) -> list[torch.Tensor]:
    """Views of the memory of variables, those of Keras included."""
    with tf.device("CPU:0"):  # copies only what is elsewhere
        return [bridge.to_torch(tf.identity(variable)) for variable in variables]


def write_variables(variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    """Assign values, whose memory the variables take over."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(bridge.to_tensorflow(value))
