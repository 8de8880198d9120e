"""Which optimizers can become distributed, and what they keep of themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras.flavours import flavour, front_end
from tests.keras.training import apply, fit_alone, fit_together, numpy, tensor, variable
from tests.ranks import RankPool


def _custom(keras: Any, with_config: bool) -> type:
    """An optimizer whose `get_config` misses `strength`, or whose class cannot take it."""

    class Custom(keras.optimizers.SGD):
        def __init__(self, learning_rate: float, strength: float = 1.0, **others: Any) -> None:
            if not with_config and others:
                raise TypeError("no options, please")
            super().__init__(learning_rate, **others)
            self.strength = strength

        def update_step(self, gradient: Any, variable: Any, *rest: Any) -> None:
            super().update_step(gradient * self.strength, variable, *rest)

    return Custom


def _kept() -> dict[str, Any]:
    keras, hvd = front_end()
    found = {}
    with_names = keras.optimizers.SGD(1.0, weight_decay=0.5)
    with_names.exclude_from_weight_decay(var_names=["bias"])
    wrapped = hvd.DistributedOptimizer(with_names)
    bias, kernel = variable(keras, [2.0], "bias"), variable(keras, [2.0], "kernel")
    apply(wrapped, [tensor(keras, [0.0])] * 2, [bias, kernel])
    found["weight decay"] = numpy(bias).tolist(), numpy(kernel).tolist()

    for with_config in (True, False):
        base = _custom(keras, with_config)(1.0, strength=3.0)
        wrapped = hvd.DistributedOptimizer(base)
        w = variable(keras, [0.0])
        apply(wrapped, [tensor(keras, [hvd.rank() + 1.0])], [w])
        found[f"custom {with_config}"] = numpy(w).tolist(), wrapped is base

    used = keras.optimizers.Adam(0.1)
    w = variable(keras, [0.0, 0.0])
    apply(used, [tensor(keras, [1.0, -1.0])], [w])
    wrapped = hvd.DistributedOptimizer(used, backward_passes_per_step=2)
    counts = [int(numpy(wrapped.iterations))]
    moments = [numpy(v) for v in wrapped.variables if tuple(v.shape) == (2,)]
    for _ in range(2):
        apply(wrapped, [tensor(keras, [hvd.rank() + 1.0, 0.0])], [w])
    counts.append(int(numpy(wrapped.iterations)))
    found["used"] = counts, any(moment.any() for moment in moments), numpy(w).tolist()
    return found


def test_settings_and_state_are_kept(keras_pool: RankPool):
    for found in keras_pool.run(_kept):
        assert found["weight decay"] == ([2.0], [1.0])
        assert found["custom True"] == ([-4.5], False)
        assert found["custom False"] == ([-4.5], True)
        counts, has_moments, values = found["used"]
        assert counts == [1, 3]
        assert has_moments
        assert values[0] < -0.1


def _rates() -> list[float]:
    """Learning rates that are functions, of a step and of nothing."""
    keras, hvd = front_end()

    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return 0.5 if flavour() != "tf_keras" else keras.backend.constant(0.5)

    w = variable(keras, [0.0])
    apply(
        hvd.DistributedOptimizer(keras.optimizers.SGD(Halving())),
        [tensor(keras, [hvd.rank() + 1.0])],
        [w],
    )
    rates = [numpy(w).tolist()]
    if flavour() != "tf_keras":
        w = variable(keras, [0.0])
        optimizer = keras.optimizers.SGD(lambda: 2.0)
        apply(hvd.DistributedOptimizer(optimizer), [tensor(keras, [hvd.rank() + 1.0])], [w])
        rates.append(numpy(w).tolist())
    return rates


def test_learning_rates_that_are_functions(keras_pool: RankPool):
    for rates in keras_pool.run(_rates):
        assert rates == [[-0.75], [-3.0]][: len(rates)]


def _from_config() -> tuple[bool, Any]:
    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.25, clipvalue=9.0))
    copy = optimizer.from_config(optimizer.get_config())
    w = variable(keras, [0.0])
    apply(copy, [tensor(keras, [hvd.rank() + 1.0])], [w])
    return copy.get_config() == optimizer.get_config(), numpy(w).tolist()


def test_a_copy_made_from_the_configuration_is_distributed(keras_pool: RankPool):
    assert keras_pool.run(_from_config) == [(True, [-1.5])] * 2


def _legacy() -> tuple[Any, Any, Any, Any]:
    keras, hvd = front_end()
    make = lambda: keras.optimizers.legacy.Adam(0.05, clipnorm=0.3, decay=0.1)  # noqa: E731
    optimizer = hvd.DistributedOptimizer(make())
    model = fit_together(
        keras,
        hvd,
        optimizer,
        compile_arguments={"experimental_run_tf_function": False},
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    alone = fit_alone(keras, make())
    count = len(optimizer.variables()), len(optimizer.variables)
    return model.get_weights(), alone.get_weights(), type(optimizer).__name__, count


def test_legacy_optimizers(keras_pools: dict[str, RankPool]):
    (first, alone, name, count), (second, *_) = keras_pools["tf_keras"].run(_legacy)
    assert name == "Adam"
    assert count == (9, 9)
    for ours, theirs, reference in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, reference, rtol=2e-4, atol=2e-6)


def _several() -> tuple[Any, Any]:
    """An optimizer made of several."""
    keras, hvd = front_end()

    def make() -> Any:
        each = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
        each[".*/out/.*"] = keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(each)

    together = fit_together(keras, hvd, hvd.DistributedOptimizer(make()))
    return together.get_weights(), fit_alone(keras, make()).get_weights()


def test_an_optimizer_made_of_several(keras3_pool: RankPool):
    (first, alone), (second, _) = keras3_pool.run(_several)
    for ours, theirs, reference in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, reference, rtol=2e-4, atol=2e-6)


def _refused() -> None:
    keras, hvd = front_end()
    sgd = keras.optimizers.SGD
    for wrong in ({"op": 3}, {"op": 2}, {"op": 17}):
        with pytest.raises(ValueError, match="op"):
            hvd.DistributedOptimizer(sgd(), **wrong)
    with pytest.raises(ValueError, match="gradient_predivide_factor needs op=Average"):
        hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="positive number, not -1"):
        hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=-1)
    for passes in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="backward_passes_per_step must be positive"):
            hvd.DistributedOptimizer(sgd(), backward_passes_per_step=passes)
    for groups in (0, -2, "a", [1]):
        with pytest.raises(ValueError, match="groups must be"):
            hvd.DistributedOptimizer(sgd(), groups=groups)
    with pytest.raises(ValueError, match="expected an optimizer of Keras, not 'adam'"):
        hvd.DistributedOptimizer("adam")
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd()))


def test_wrong_arguments_are_refused(keras_pool: RankPool):
    keras_pool.run(_refused)
