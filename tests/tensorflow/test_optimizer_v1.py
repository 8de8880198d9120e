"""DistributedOptimizer around optimizers of tf.compat.v1: in sessions, eagerly, in functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from tests.ranks import RankPool, run_ranks

v1 = tf.compat.v1


def _target(step: int, rank: int) -> np.ndarray:
    return np.array([step + 1.0, 3.0 * rank - step, 0.5], np.float32)


def _graph(
    make: Callable[[], Any], steps: int, use_resource: bool = True, **arguments: Any
) -> dict[str, Any]:
    """Minimise the distance to moving targets, in a session."""
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("w", initializer=[1.0, 1.0, 1.0], use_resource=use_resource)
        table = v1.get_variable("table", initializer=tf.ones([4, 2]), use_resource=use_resource)
        unused = v1.get_variable("unused", initializer=2.0, use_resource=use_resource)
        target = v1.placeholder(tf.float32, [3])
        global_step = v1.train.get_or_create_global_step()
        loss = tf.reduce_sum(tf.square(variable - target))
        if not arguments.get("dense_only"):
            loss += tf.reduce_sum(tf.nn.embedding_lookup(table, [hvd.rank(), 2]))
        arguments.pop("dense_only", None)
        optimizer = hvd.DistributedOptimizer(make(), **arguments)
        train = optimizer.minimize(
            loss, global_step=global_step, var_list=[variable, table, unused]
        )
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        session.run(hvd.broadcast_global_variables(0))
        history = []
        for step in range(steps):
            session.run(train, {target: _target(step, hvd.rank())})
            history.append(session.run(variable).tolist())
        return {
            "history": history,
            "table": session.run(table).tolist(),
            "unused": float(session.run(unused)),
            "global_step": int(session.run(global_step)),
            "name": optimizer.get_name(),
            "slots": optimizer.get_slot_names(),
            "slot": session.run(slot).tolist()
            if (slots := optimizer.get_slot_names())
            and (slot := optimizer.get_slot(variable, slots[-1])) is not None
            else None,
            "variables": len(optimizer.variables()),
        }


def _momentum() -> Any:
    return v1.train.MomentumOptimizer(0.1, 0.9)


def _sgd() -> Any:
    return v1.train.GradientDescentOptimizer(0.1)


def _expected_momentum(steps: int) -> list[list[float]]:
    weights, velocity = np.ones(3, np.float32), np.zeros(3, np.float32)
    history = []
    for step in range(steps):
        gradient = np.mean([2 * (weights - _target(step, rank)) for rank in (0, 1)], axis=0)
        velocity = 0.9 * velocity + gradient
        weights = weights - 0.1 * velocity
        history.append(weights.tolist())
    return history


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_in_a_session(tf_pool2: RankPool, use_resource: bool):
    one, other = tf_pool2.run(_graph, _momentum, 4, use_resource)
    assert one == other
    np.testing.assert_allclose(one["history"], _expected_momentum(4), rtol=1e-5)
    # Momentum 0.9 over four steps moves by 1, 1.9, 2.71 and 3.439 times the rate.
    moved = 0.1 * (1 + 1.9 + 2.71 + 3.439)
    np.testing.assert_allclose(
        one["table"],
        [[1 - moved / 2] * 2, [1 - moved / 2] * 2, [1 - moved] * 2, [1.0] * 2],
        rtol=1e-5,
    )
    assert one["unused"] == 2.0
    assert one["global_step"] == 4
    assert one["name"] == "DistributedMomentumOptimizer"
    assert one["slots"] == ["momentum"]
    assert one["slot"] is not None


def _eager(in_function: bool) -> list[list[float]]:
    variable, table = tf.Variable([1.0, 1.0, 1.0]), tf.Variable(tf.ones([4, 2]))
    optimizer = hvd.DistributedOptimizer(_momentum(), name="Eager", groups=1)
    assert optimizer.get_name() == "Eager"

    def step(target: tf.Tensor) -> None:
        def loss() -> tf.Tensor:
            found = tf.nn.embedding_lookup(table, [hvd.rank(), 2])
            return tf.reduce_sum(tf.square(variable - target)) + tf.reduce_sum(found)

        optimizer.minimize(loss, var_list=[variable, table])

    call = tf.function(step) if in_function else step
    history = []
    for number in range(3):
        call(tf.constant(_target(number, hvd.rank())))
        history.append(variable.numpy().tolist())
    return history


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_without_a_session(tf_pool2: RankPool, in_function: bool):
    one, other = tf_pool2.run(_eager, in_function)
    assert one == other
    np.testing.assert_allclose(one, _expected_momentum(3), rtol=1e-5)


def _two_at_once(passes: int, op: Any) -> list[list[float]]:
    """Two optimizers of one kind, as for the two models of a GAN, in one run of a session."""
    with tf.Graph().as_default(), v1.Session() as session:
        variables, trains = [], []
        for scope, shape in (("generator", [2]), ("discriminator", [3])):
            with v1.variable_scope(scope):
                variables.append(v1.get_variable("w", initializer=tf.zeros(shape)))
                optimizer = hvd.DistributedOptimizer(
                    v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=passes, op=op
                )
                loss = tf.reduce_sum(variables[-1]) * (hvd.rank() + 1.0)
                trains.append(optimizer.minimize(loss, var_list=variables[-1:]))
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for _ in range(4):
            session.run(trains)
        return [value.tolist() for value in session.run(variables)]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_two_optimizers_in_one_run(tf_pool2: RankPool, passes: int, op: Any):
    # Steps in the same direction, 1 and 2 long, are combined to their mean by either.
    assert tf_pool2.run(_two_at_once, passes, op) == [[[-6.0] * 2, [-6.0] * 3]] * 2


# -- several passes for one step ------------------------------------------------------------


def _passes(average: bool) -> dict[str, Any]:
    return _graph(
        _sgd,
        5,
        dense_only=True,
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )


@pytest.mark.parametrize("average", [False, True])
def test_several_passes(tf_pool2: RankPool, average: bool):
    one, other = tf_pool2.run(_passes, average)
    assert one == other
    weights = np.ones(3, np.float32)
    expected = []
    for step in range(5):
        if step % 2 == 1:  # the gradients of two passes, at the same place
            gradient = sum(
                np.mean([2 * (weights - _target(s, rank)) for rank in (0, 1)], axis=0)
                for s in (step - 1, step)
            )
            weights = weights - 0.1 * gradient / (2 if average else 1)
        expected.append(weights.tolist())
    np.testing.assert_allclose(one["history"], expected, rtol=1e-5)
    assert one["global_step"] == 5


def _sparse_passes() -> dict[str, Any]:
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        _graph(_sgd, 1, backward_passes_per_step=2)
    return _graph(_sgd, 2, backward_passes_per_step=2, sparse_as_dense=True)


def test_several_passes_with_embeddings(tf_pool2: RankPool):
    one, other = tf_pool2.run(_sparse_passes)
    assert one == other
    np.testing.assert_allclose(one["table"], [[0.9] * 2, [0.9] * 2, [0.8] * 2, [1.0] * 2])


# -- local variables ------------------------------------------------------------------------


def _local(passes: int, scale: bool) -> list[float]:
    with tf.Graph().as_default(), v1.Session() as session:
        mine, shared = v1.get_variable("a", initializer=0.0), v1.get_variable("b", initializer=0.0)
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0),
            backward_passes_per_step=passes,
            scale_local_gradients=scale,
        )
        optimizer.register_local_var(mine)
        train = optimizer.minimize((mine + shared) * (hvd.rank() + 1.0))
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for _ in range(passes):
            session.run(train)
        return [float(value) for value in session.run([mine, shared])]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("scale", [True, False])
def test_local_variables(tf_pool2: RankPool, passes: int, scale: bool):
    divisor = 2 if scale else 1
    expected = [[-passes * (rank + 1) / divisor, -passes * 1.5] for rank in (0, 1)]
    assert tf_pool2.run(_local, passes, scale) == expected


# -- Adasum ---------------------------------------------------------------------------------


def _adasum_expected(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    dot = float(one @ other)
    return (1 - dot / (2 * one @ one)) * one + (1 - dot / (2 * other @ other)) * other


def _adasum_graph(passes: int, steps: int) -> dict[str, Any]:
    return _graph(_sgd, steps, dense_only=True, op=hvd.Adasum, backward_passes_per_step=passes)


@pytest.mark.parametrize("passes", [1, 2])
def test_adasum_combines_steps(tf_pool2: RankPool, passes: int):
    one, other = tf_pool2.run(_adasum_graph, passes, 4)
    ranks = [np.ones(3), np.ones(3)]
    start = np.ones(3)
    for step in range(4):
        ranks = [w - 0.2 * (w - _target(step, rank)) for rank, w in enumerate(ranks)]
        if step % passes == passes - 1:
            start = start + _adasum_expected(ranks[0] - start, ranks[1] - start)
            ranks = [start, start]
        np.testing.assert_allclose(one["history"][step], ranks[0], rtol=1e-5)
        np.testing.assert_allclose(other["history"][step], ranks[1], rtol=1e-5)
    assert one["history"][-1] == other["history"][-1]
    assert one["global_step"] == 4
    assert one["name"] == "DistributedDeltaGradientDescentOptimizer"
    assert one["slots"] == ["delta_start"]


def _adasum_eager(in_function: bool) -> tuple[list[float], list[str]]:
    weights, table = tf.Variable([1.0, 1.0, 1.0]), tf.Variable(tf.ones([3, 1]))
    optimizer = hvd.DistributedOptimizer(_momentum(), op=hvd.Adasum, backward_passes_per_step=2)

    def step(target: tf.Tensor) -> None:
        def loss() -> tf.Tensor:
            found = tf.nn.embedding_lookup(table, [hvd.rank()])
            return tf.reduce_sum(tf.square(weights - target)) + tf.reduce_sum(found)

        optimizer.minimize(loss, var_list=[weights, table])

    call = tf.function(step) if in_function else step
    for number in range(4):
        call(tf.constant(_target(number, hvd.rank())))
    return [*weights.numpy().tolist(), *table.numpy().ravel().tolist()], optimizer.get_slot_names()


def test_adasum_without_a_session(tf_pool2: RankPool):
    eager = tf_pool2.run(_adasum_eager, False)
    function = tf_pool2.run(_adasum_eager, True)
    assert eager[0] == eager[1] == function[0] == function[1]
    assert eager[0][1] == ["delta_start", "momentum"]
    assert eager[0][0][5] == 1.0  # a row that nobody looked up


# -- what it refuses, and what it hands on --------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": hvd.Adasum, "average_aggregated_gradients": True}, "does not go with"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op=Average"),
        ({"groups": 0}, "groups must be"),
        ({"backward_passes_per_step": 0}, "must be positive, not 0"),
        ({"backward_passes_per_step": 2}, "needs a v1 graph"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(_sgd(), **arguments)


def test_adasum_takes_no_keras_optimizer_and_no_process_set():
    with pytest.raises(ValueError, match=r"needs a tf\.compat\.v1 optimizer"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="global process set"):
        hvd.DistributedOptimizer(_sgd(), op=hvd.Adasum, process_set=hvd.ProcessSet([0]))


def _keras(rank: int, size: int) -> list[float]:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    variables = [tf.Variable(0.0), tf.Variable(0.0)]
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0), op=hvd.Sum, groups=[variables], process_set=pair
    )
    gradients = [tf.constant(rank + 1.0), tf.constant(10.0)]
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    return [float(variable) for variable in variables]


def test_optimizers_of_keras_get_all_arguments():
    assert run_ranks(_keras, 3) == [[-3.0, -20.0], [-3.0, -20.0], [-3.0, -10.0]]
