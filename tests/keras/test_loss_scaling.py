"""Loss scaling: where one rank's gradients overflow, all ranks skip the step alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras.flavours import flavour, front_end
from tests.keras.training import (
    BATCH,
    apply,
    data,
    fit,
    numpy,
    share,
    small_model,
    tensor,
    variable,
)
from tests.ranks import RankPool

SCALE = 1024.0


def _loss_scaler(keras: Any) -> Any:
    if flavour() == "tf_keras":
        return keras.mixed_precision.LossScaleOptimizer
    return keras.optimizers.LossScaleOptimizer


def _wrapped(keras: Any, hvd: Any, order: str, **arguments: Any) -> Any:
    scaler = _loss_scaler(keras)
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    if order == "horovod outside":
        return hvd.DistributedOptimizer(scaler(optimizer, initial_scale=SCALE), **arguments)
    return scaler(hvd.DistributedOptimizer(optimizer, **arguments), initial_scale=SCALE)


def _scale(optimizer: Any) -> float:
    if flavour() == "tf_keras":
        return float(numpy(optimizer.loss_scale))
    return float(numpy(optimizer.dynamic_scale))


def _take(optimizer: Any, gradient: Any, w: Any) -> None:
    if flavour() != "jax":
        apply(optimizer, [gradient], [w])
        return
    if not optimizer.built:
        optimizer.build([w])
    state = [each.value for each in optimizer.variables]
    values, state = optimizer.stateless_apply(state, [gradient], [w.value])
    w.assign(values[0])
    for each, value in zip(optimizer.variables, state, strict=True):
        each.assign(value)


def _steps(order: str) -> list[Any]:
    """Three steps, the second of which overflows on rank 1."""
    keras, hvd = front_end()
    optimizer = _wrapped(keras, hvd, order)
    w = variable(keras, np.zeros(2))
    # tf-keras's optimizer leaves it to its caller to divide gradients by the scale.
    unit = 1.0 if flavour() == "tf_keras" else SCALE
    history = []
    for number in range(3):
        gradient = np.full(2, (hvd.rank() + 1.0) * unit)
        if number == 1 and hvd.rank() == 1:
            gradient[0] = np.inf
        _take(optimizer, tensor(keras, gradient), w)
        history.append((numpy(w).tolist(), _scale(optimizer)))
        unit = 1.0 if flavour() == "tf_keras" else _scale(optimizer)
    return [history, type(optimizer).__name__.startswith("LossScaleOptimizer")]


@pytest.mark.parametrize("order", ["horovod outside", "horovod inside"])
def test_all_ranks_skip_the_step_that_one_rank_cannot_take(keras_pool: RankPool, order: str):
    for history, is_scaler in keras_pool.run(_steps, order):
        assert is_scaler
        assert [scale for _, scale in history] == [SCALE, SCALE / 2, SCALE / 2]
        assert [value for value, _ in history] == [[-1.5, -1.5], [-1.5, -1.5], [-3.75, -3.75]]


def _local() -> list[float]:
    keras, hvd = front_end()
    optimizer = _wrapped(keras, hvd, "horovod outside", scale_local_gradients=False)
    w = variable(keras, np.zeros(1))
    optimizer.register_local_var(w)
    unit = 1.0 if flavour() == "tf_keras" else SCALE
    _take(optimizer, tensor(keras, [(hvd.rank() + 1.0) * unit]), w)
    return numpy(w).tolist()


def test_local_variables(keras_pool: RankPool):
    assert keras_pool.run(_local) == [[-1.0], [-2.0]]


def _mixed_precision(order: str, passes: int) -> tuple[Any, Any, float, int]:
    """`fit` with mixed_float16; rank 1 overflows in one batch."""
    keras, hvd = front_end()
    if flavour() == "tf_keras":
        keras.mixed_precision.set_global_policy("mixed_float16")
    else:
        keras.config.set_dtype_policy("mixed_float16")
    try:
        model = small_model(keras)
        x, y = data(4)
        x, y = share(x, hvd.rank()), share(y, hvd.rank())
        if hvd.rank() == 1:
            x[2 * BATCH] = 6e4  # in the third batch
            y[2 * BATCH] = 6e4
        optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        if order == "by Keras":  # which wraps it by itself
            optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
        else:
            optimizer = _wrapped(keras, hvd, order, backward_passes_per_step=passes)
        before = model.get_weights()
        fit(model, optimizer, x, y, BATCH)
    finally:
        if flavour() == "tf_keras":
            keras.mixed_precision.set_global_policy("float32")
        else:
            keras.config.set_dtype_policy("float32")
    changed = any(
        not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)
    )
    assert changed
    optimizer = model.optimizer
    iterations = int(numpy(optimizer.inner_optimizer.iterations))
    return model.get_weights(), list(optimizer.get_config()), _scale(optimizer), iterations


@pytest.mark.parametrize(("order", "passes"), [("by Keras", 1), ("horovod outside", 2)])
def test_mixed_precision_in_fit(keras_pool: RankPool, order: str, passes: int):
    (first, config, scale, iterations), (second, *rest) = keras_pool.run(
        _mixed_precision, order, passes
    )
    assert "inner_optimizer" in config
    assert [scale, iterations] == rest[1:]
    assert scale < SCALE or order == "by Keras"
    for ours, theirs in zip(first, second, strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_array_equal(ours, theirs)
