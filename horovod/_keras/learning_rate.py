"""Changing the learning rate of a model in training, for the callbacks that do."""

from __future__ import annotations

from typing import Any

from horovod._keras.flavour import is_tf_keras, keras_of


def current(model: Any) -> float:
    """The learning rate of the model's optimizer."""
    optimizer = model.optimizer
    if is_tf_keras(optimizer):
        return float(keras_of(optimizer).backend.get_value(optimizer.learning_rate))
    return float(keras_of(optimizer).ops.convert_to_numpy(optimizer.learning_rate))


def change(model: Any, rate: float, momentum_correction: bool) -> None:
    """Set the learning rate; with `momentum_correction` scale what momentum has gathered with it.

    Keras has the learning rate inside of what momentum gathers: v = m * v - rate * gradient. After
    a change, v would be as large as the old rate made it. Scaling v does what scaling m for one
    step would, and m is a constant of the compiled step.
    """
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if callable(getattr(inner, "_learning_rate", None)):
        raise ValueError(
            "the optimizer's learning rate is a schedule of its own, so that a callback cannot set "
            "it: give the optimizer a number"
        )
    keras = keras_of(optimizer)
    before = current(model)
    if is_tf_keras(optimizer):
        keras.backend.set_value(optimizer.learning_rate, rate)
    else:
        optimizer.learning_rate = rate
    if momentum_correction and before > 0 and rate != before:
        factor = rate / before
        for gathered in _gathered(inner):
            if is_tf_keras(optimizer):
                value = keras.backend.get_value(gathered)
                keras.backend.set_value(gathered, value * value.dtype.type(factor))
            else:
                gathered.assign(keras.ops.multiply(gathered, factor))


def _gathered(optimizer: Any) -> list[Any]:
    """What momentum has gathered, in optimizers that have an option of that name."""
    slots = getattr(optimizer, "_slots", None)
    if isinstance(slots, dict):  # tf_keras.optimizers.legacy
        return [each["momentum"] for each in slots.values() if "momentum" in each]
    if not hasattr(optimizer, "momentum"):
        return []
    found = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    return [variable for variable in found if variable is not None]
