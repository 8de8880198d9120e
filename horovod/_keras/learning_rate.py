"""Changes the learning rate of a model in training, for the callbacks."""

from __future__ import annotations

from typing import Any

from horovod._keras.flavour import is_tf_keras, keras_of


def read_rate(model: Any) -> float:
    """Return the learning rate of the model's optimizer."""
    optimizer = model.optimizer
    if is_tf_keras(optimizer):
        return float(keras_of(optimizer).backend.get_value(optimizer.learning_rate))
    return float(keras_of(optimizer).ops.convert_to_numpy(optimizer.learning_rate))


def change_rate(model: Any, rate: float, momentum_correction: bool) -> None:
    """Set the learning rate; with `momentum_correction` also scale the accumulated momentum.

    In Keras the accumulated momentum v contains the learning rate: v = m * v - rate * gradient.
    After a change of the rate, v still has the scale of the old rate. Scaling v has the same effect
    as scaling m for one step, which is not possible: m is a constant of the compiled step.
    """
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if callable(getattr(inner, "_learning_rate", None)):
        raise ValueError(
            "the optimizer's learning rate is a schedule of its own, so that a callback cannot set "
            "it: give the optimizer a number"
        )
    keras = keras_of(optimizer)
    before = read_rate(model)
    if is_tf_keras(optimizer):
        keras.backend.set_value(optimizer.learning_rate, rate)
    else:
        optimizer.learning_rate = rate
    if momentum_correction and before > 0 and rate != before:
        factor = rate / before
        for variable in _momentum_variables(inner):
            if is_tf_keras(optimizer):
                value = keras.backend.get_value(variable)
                keras.backend.set_value(variable, value * value.dtype.type(factor))
            else:
                variable.assign(keras.ops.multiply(variable, factor))


def _momentum_variables(optimizer: Any) -> list[Any]:
    """Return the variables that accumulate momentum; none if the optimizer has no such option."""
    slots = getattr(optimizer, "_slots", None)
    if isinstance(slots, dict):  # tf_keras.optimizers.legacy
        return [each["momentum"] for each in slots.values() if "momentum" in each]
    if not hasattr(optimizer, "momentum"):
        return []
    momentums = (
        getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    )
    return [variable for variable in momentums if variable is not None]
