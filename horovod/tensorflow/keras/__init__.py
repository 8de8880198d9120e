"""Horovod for tf.keras: ``import horovod.tensorflow.keras as hvd``.

tf.keras is Keras 3, or tf-keras (Keras 2) with TF_USE_LEGACY_KERAS=1; both work. For custom
training loops use `horovod.tensorflow`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from horovod._keras import old_compile, optimizer
from horovod._keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovod._keras.optimizer import distribute as distribute
from horovod._keras.values import Values
from horovod.common.local_steps import OuterSGD
from horovod.engine import shared_api as _shared_api
from horovod.engine.shared_api import *  # noqa: F403
from horovod.engine.shared_api import init, shutdown
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.keras import callbacks
from horovod.tensorflow.keras import elastic as elastic

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "OuterSGD",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "init",
    "load_model",
    "reducescatter",
    "shutdown",
]
__all__ += _shared_api.__all__

_values = Values("tensorflow")
allgather = _values.allgather
allreduce = _values.allreduce
broadcast = _values.broadcast
broadcast_global_variables = _values.broadcast_global_variables
reducescatter = _values.reducescatter

if hasattr(tf.keras, "ops"):  # Keras 3
    old_compile.explain_when_it_fails()


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model; its optimizer, with its state, becomes a `DistributedOptimizer`.

    Args:
        filepath: The file that `model.save` wrote.
        custom_optimizers: Optimizer classes that are not part of Keras; none by default.
        custom_objects: Other custom classes and functions, by their names in the file.
        compression: The compression of the `DistributedOptimizer`; none by default.
        legacy_opts: Accepted for compatibility; the file itself says which optimizer it has.

    Returns:
        The model.
    """
    return optimizer.load_model(tf.keras, filepath, custom_optimizers, custom_objects, compression)
