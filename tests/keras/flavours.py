"""Which Keras a pool's ranks use: their environment, and how functions that run there get it."""

from __future__ import annotations

import importlib
import os
from typing import Any

from tests.effort import LONG

FLAVOURS = {
    "tensorflow": {"KERAS_BACKEND": "tensorflow"},  # Keras 3 as tf.keras
    "tf_keras": {"TF_USE_LEGACY_KERAS": "1"},  # Keras 2 as tf.keras
    "torch": {"KERAS_BACKEND": "torch"},
    "jax": {"KERAS_BACKEND": "jax"},
}

# For whole programs, which XLA takes longer to optimize than to run: in long tests alone it does.
QUICK = {} if LONG else {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def flavour() -> str:
    """The flavour of this rank."""
    return os.environ.get("KERAS_BACKEND", "tf_keras")


def front_end() -> tuple[Any, Any]:
    """Keras and Horovod for it, in a rank of a pool."""
    if flavour() in ("tensorflow", "tf_keras"):
        tensorflow = importlib.import_module("tensorflow")
        keras, hvd = tensorflow.keras, importlib.import_module("horovod.tensorflow.keras")
    else:
        keras, hvd = importlib.import_module("keras"), importlib.import_module("horovod.keras")
        assert keras.config.backend() == flavour()
    keras.utils.set_random_seed(7)
    return keras, hvd
