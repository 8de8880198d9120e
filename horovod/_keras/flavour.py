"""Tells which Keras an object belongs to, and which backend computes for it."""

from __future__ import annotations

import importlib
from typing import Any


def is_tf_keras(thing: Any) -> bool:
    """Return whether an optimizer or a model belongs to tf-keras (Keras 2), not to Keras 3."""
    return any(base.__module__.split(".")[0] == "tf_keras" for base in type(thing).__mro__)


def is_optimizer(thing: Any) -> bool:
    """Return whether this is an optimizer of any Keras."""
    return any(
        base.__name__ in ("BaseOptimizer", "_BaseOptimizer", "OptimizerV2")
        and base.__module__.split(".")[0] in ("keras", "tf_keras")
        for base in type(thing).__mro__
    )


def keras_of(thing: Any) -> Any:
    """Return the Keras package that an optimizer or a model belongs to."""
    return importlib.import_module("tf_keras" if is_tf_keras(thing) else "keras")


def backend_of(thing: Any) -> str:
    """Return the backend of an optimizer or a model: "tensorflow", "torch" or "jax"."""
    if is_tf_keras(thing):
        return "tensorflow"
    return str(keras_of(thing).config.backend())
