"""Gradients are reduced exactly once, whichever way a script takes from a loss to a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras.flavours import front_end
from tests.keras.training import variable
from tests.ranks import RankPool

# Ranks have gradients 1 and 2.
WANTED = {"Average": 1.5, "Sum": 3.0}


def _values(w: Any) -> list[float]:
    return np.array(w).tolist()


def _ways(kind: str, op_name: str, compiled: bool, passes: int) -> dict[str, Any]:
    """What each way subtracts from a variable in `passes` passes of a step, and the last result."""
    import tensorflow as tf

    import horovod.tensorflow as hvd_tf

    keras, hvd = front_end()
    op = getattr(hvd, op_name)
    me = float(hvd.rank() + 1)
    makers = {
        "sgd": lambda: keras.optimizers.SGD(1.0),
        "legacy": lambda: keras.optimizers.legacy.SGD(1.0),
        "scaled": lambda: keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), dynamic=False, initial_scale=4.0
        ),
    }
    in_graph = tf.function if compiled else lambda function: function
    results: dict[str, Any] = {}

    def way(name: str, make_step: Any) -> None:
        # Each a variable and an optimizer of its own, and what the tape saw is that of this rank.
        w = variable(keras, np.zeros(2), name)
        variables = [w] if kind != "keras3" else [w.value]
        optimizer = hvd.DistributedOptimizer(
            makers.get(kind, makers["sgd"])(), op=op, backward_passes_per_step=passes
        )
        step = in_graph(lambda: make_step(optimizer, variables))
        for _ in range(passes):
            step()
        results[name] = _values(w)

    def loss(variables: list[Any]) -> Any:
        return tf.reduce_sum(tf.convert_to_tensor(variables[0]) * me)

    def plain(optimizer: Any, variables: list[Any]) -> None:
        with tf.GradientTape() as tape:
            value = loss(variables)
        optimizer.apply_gradients(
            list(zip(tape.gradient(value, variables), variables, strict=True))
        )

    def tape(optimizer: Any, variables: list[Any]) -> None:
        with hvd_tf.DistributedGradientTape(tf.GradientTape(), op=op) as tape:
            value = loss(variables)
        optimizer.apply_gradients(
            list(zip(tape.gradient(value, variables), variables, strict=True))
        )

    def clipped_tape(optimizer: Any, variables: list[Any]) -> None:
        with hvd_tf.DistributedGradientTape(tf.GradientTape(), op=op) as tape:
            value = loss(variables)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(value, variables), 1000.0)
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

    def minimize(optimizer: Any, variables: list[Any]) -> None:
        optimizer.minimize(lambda: loss(variables), variables)

    def minimize_with_tape(optimizer: Any, variables: list[Any]) -> None:
        with hvd_tf.DistributedGradientTape(tf.GradientTape(), op=op) as tape:
            value = loss(variables)
        optimizer.minimize(value, variables, tape=tape)

    def computed(optimizer: Any, variables: list[Any]) -> None:
        compute = getattr(optimizer, "compute_gradients", None) or optimizer._compute_gradients
        pairs = compute(lambda: loss(variables), variables)
        optimizer.apply_gradients([(gradient * 1.0, each) for gradient, each in pairs])

    ways = [plain, tape, clipped_tape]
    if kind != "keras3":
        ways += [minimize, computed]
        ways += [minimize_with_tape] if kind != "scaled" else []
    for each in ways:
        way(each.__name__, each)
    return results


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize(
    ("kind", "passes"),
    [(kind, passes) for kind in ("sgd", "legacy", "keras3") for passes in (1, 2)] + [("scaled", 1)],
)
def test_every_way_reduces_once(
    keras_pools: dict[str, RankPool], kind: str, op: str, compiled: bool, passes: int
):
    pool = keras_pools["tensorflow" if kind == "keras3" else "tf_keras"]
    for results in pool.run(_ways, kind, op, compiled, passes):
        assert results == {name: [-WANTED[op] * passes] * 2 for name in results}


def _computed_gradients(op_name: str) -> list[Any]:
    """What a script gets that applies gradients itself; then a step with plain ones."""
    import tensorflow as tf

    keras, hvd = front_end()
    me = float(hvd.rank() + 1)
    found = []
    for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        optimizer = hvd.DistributedOptimizer(make(1.0), op=getattr(hvd, op_name))
        w = variable(keras, np.zeros(2))
        for compute in (optimizer.compute_gradients, optimizer._compute_gradients):
            for _ in range(2):  # the second time as well, though nothing was applied
                pairs = compute(lambda w=w: tf.reduce_sum(w * me), [w])
            found.append(_values(pairs[0][0]))
        optimizer.apply_gradients(pairs)
        optimizer.apply_gradients([(tf.constant([me, me]), w)])
        found.append(_values(w))
    with pytest.raises(ValueError, match="grad_loss"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))._compute_gradients(
            lambda: w, [w], grad_loss=w
        )
    return found


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_computed_gradients_are_those_of_all(keras_pools: dict[str, RankPool], op: str):
    wanted = WANTED[op]
    for found in keras_pools["tf_keras"].run(_computed_gradients, op):
        assert found == [[wanted] * 2, [wanted] * 2, [-2 * wanted] * 2] * 2


def _in_a_v1_graph() -> list[Any]:
    import tensorflow as tf

    keras, hvd = front_end()
    me = float(hvd.rank() + 1)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(1.0), op=hvd.Sum)
        w = tf.compat.v1.get_variable("w", initializer=tf.zeros(2), use_resource=True)
        loss = tf.reduce_sum(w * me)
        gradients = optimizer.get_gradients(loss, [w])
        update = optimizer.apply_gradients(list(zip(gradients, [w], strict=True)))
        (both,) = optimizer.get_updates(loss, [w])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(update)
        found = [session.run(gradients)[0].tolist(), session.run(w).tolist()]
        session.run(both)
        return [*found, session.run(w).tolist()]


def test_get_gradients_of_a_v1_graph(keras_pools: dict[str, RankPool]):
    for found in keras_pools["tf_keras"].run(_in_a_v1_graph):
        assert found == [[3, 3], [-3, -3], [-6, -6]]


def _another_optimizer_first() -> list[float]:
    """A distributed tape's gradients go to a plain optimizer, plain ones in a graph to ours."""
    import tensorflow as tf

    import horovod.tensorflow as hvd_tf

    keras, hvd = front_end()
    me = float(hvd.rank() + 1)
    w = tf.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)

    @tf.function
    def plain() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * me)
        optimizer.apply_gradients(list(zip(tape.gradient(loss, [w]), [w], strict=True)))

    with hvd_tf.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(w * me)
    keras.optimizers.SGD(1.0).apply_gradients([(tape.gradient(loss, w), w)])
    plain()
    return _values(w)


def test_what_a_tape_reduced_elsewhere_is_not_remembered_in_a_graph(
    keras_pools: dict[str, RankPool],
):
    assert keras_pools["tf_keras"].run(_another_optimizer_first) == [[-4.5, -4.5]] * 2


def _counts_passes() -> list[Any]:
    import tensorflow as tf

    import horovod.tensorflow as hvd_tf
    from horovod.tensorflow import util

    assert hvd_tf._executing_eagerly is util._executing_eagerly
    assert util._executing_eagerly()
    assert not tf.function(lambda: tf.constant(util._executing_eagerly()))().numpy()
    keras, hvd = front_end()
    found: list[Any] = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))._agg_helper]
    for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        optimizer = hvd.DistributedOptimizer(make(1.0), backward_passes_per_step=3)
        w = variable(keras, np.zeros(2))
        for _ in range(4):
            pairs = optimizer._compute_gradients(lambda w=w: tf.reduce_sum(w), [w])
            found.append(int(optimizer._agg_helper.counter.numpy()))
            optimizer.apply_gradients(pairs)
        found.append((_values(w), int(optimizer.iterations.numpy())))
    return found


def test_names_that_scripts_read(keras_pools: dict[str, RankPool]):
    counted = [1, 2, 0, 1, ([-3.0, -3.0], 4)]
    assert keras_pools["tf_keras"].run(_counts_passes) == [[None, *counted, *counted]] * 2
