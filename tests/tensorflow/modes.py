"""The ways in which TensorFlow runs a collective, for tests that try them all. Runs in a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

MODES = ["eager", "variables", "arrays", "function", "unknown shapes", "session"]

Step = Callable[..., Sequence[Any]]  # tensors in, a list of tensors out


def run_in(mode: str, step: Step, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What `step` makes of the arrays; what it was given must not change."""
    before = [array.copy() for array in arrays]
    results = _RUN[mode](step, arrays)
    for array, copy in zip(arrays, before, strict=True):
        assert array.tobytes() == copy.tobytes(), "an input was changed"
    return [np.asarray(result) for result in results]


def _eager(step: Step, arrays: Sequence[np.ndarray]) -> list[Any]:
    tensors = [tf.constant(array) for array in arrays]
    results = [result.numpy() for result in step(*tensors)]
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.numpy().tobytes() == array.tobytes(), "an input was changed"
    return results


def _variables(step: Step, arrays: Sequence[np.ndarray]) -> list[Any]:
    variables = [tf.Variable(array) for array in arrays]
    results = [result.numpy() for result in step(*variables)]
    for variable, array in zip(variables, arrays, strict=True):
        assert variable.numpy().tobytes() == array.tobytes(), "a variable was changed"
    return results


def _arrays(step: Step, arrays: Sequence[np.ndarray]) -> list[Any]:
    return [result.numpy() for result in step(*arrays)]


def _function(step: Step, arrays: Sequence[np.ndarray]) -> list[Any]:
    tensors = [tf.constant(array) for array in arrays]
    compiled = tf.function(step)
    results: list[Any] = []
    for _ in range(2):  # once traced, once more as it is
        results = [result.numpy() for result in compiled(*tensors)]
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.numpy().tobytes() == array.tobytes(), "an input was changed"
    return results


def _unknown_shapes(step: Step, arrays: Sequence[np.ndarray]) -> list[Any]:
    signature = [tf.TensorSpec(None, array.dtype) for array in arrays]
    compiled = tf.function(step, input_signature=signature)
    return [result.numpy() for result in compiled(*map(tf.constant, arrays))]


def _session(step: Step, arrays: Sequence[np.ndarray]) -> list[Any]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        places = [tf.compat.v1.placeholder(array.dtype) for array in arrays]
        results: list[Any] = session.run(step(*places), dict(zip(places, arrays, strict=True)))
        return results


_RUN = {
    "eager": _eager,
    "variables": _variables,
    "arrays": _arrays,
    "function": _function,
    "unknown shapes": _unknown_shapes,
    "session": _session,
}
