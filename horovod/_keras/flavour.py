"""Which Keras an object is of, and what computes for it."""

from __future__ import annotations

import importlib
from typing import Any


def is_tf_keras(thing: Any) -> bool:
    """Whether an optimizer or a model is of tf-keras (Keras 2), not of Keras 3."""
    return any(base.__module__.split(".")[0] == "tf_keras" for base in type(thing).__mro__)


def is_optimizer(thing: Any) -> bool:
    """Whether this is an optimizer of any Keras."""
    return any(
        base.__name__ in ("BaseOptimizer", "_BaseOptimizer", "OptimizerV2")
        and base.__module__.split(".")[0] in ("keras", "tf_keras")
        for base in type(thing).__mro__
    )


def keras_of(thing: Any) -> Any:
    """The Keras package that an optimizer or a model is of."""
    return importlib.import_module("tf_keras" if is_tf_keras(thing) else "keras")


def backend_of(thing: Any) -> str:
    """What computes for an optimizer or a model: "tensorflow", "torch" or "jax"."""
    if is_tf_keras(thing):
        return "tensorflow"
    return str(keras_of(thing).config.backend())
