"""Adding up the gradients of several passes before they are reduced and applied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.common.optimizer_options import OptimizerOptions
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager
from horovod.tensorflow.gradients import GradientReduction
from tests.ranks import RankPool


class _Optimizer:
    """Subtracts gradients and counts, as the optimizers of Keras do."""

    def __init__(self) -> None:
        self.iterations = tf.Variable(0, dtype=tf.int64)

    def apply_gradients(self, pairs: Any) -> None:
        for gradient, variable in pairs:
            if gradient is not None:
                variable.assign_sub(gradient)
        self.iterations.assign_add(1)


def _doubled(gradients: list[Any], variables: list[Any]) -> list[Any]:
    """In place of a reduction, for tests of one process."""
    assert len(gradients) == len(variables)
    return [None if gradient is None else gradient * 2 for gradient in gradients]


def _run_passes(
    helper: Any, variables: list[tf.Variable], passes: list[list[Any]], in_function: bool
) -> tuple[list[list[float]], int]:
    """The first variable after every pass, and the iterations that were counted."""
    optimizer = _Optimizer()

    def step(*gradients: Any) -> None:
        padded = [*gradients, *[None] * (len(variables) - len(gradients))]
        computed = helper.compute_gradients(padded, variables)
        pairs = list(zip(computed, variables, strict=True))
        helper.apply_gradients(lambda: optimizer.apply_gradients(pairs), optimizer, pairs)

    call = tf.function(step) if in_function else step
    history = []
    for gradients in passes:
        call(*[tf.constant(gradient, tf.float32) for gradient in gradients])
        history.append(variables[0].numpy().tolist())
    return history, int(optimizer.iterations)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("average", [False, True])
def test_one_step_for_several_passes(in_function: bool, average: bool):
    helper = LocalGradientAggregationHelperEager(3, _doubled, False, average)
    variables = [tf.Variable([0.0, 10.0]), tf.Variable(1.0), tf.Variable(5.0)]
    passes = [[[n, 1.0], n] for n in range(1, 8)]
    history, iterations = _run_passes(helper, variables, passes, in_function)
    divisor = 3 if average else 1
    first, second = 2 * (1 + 2 + 3) / divisor, 2 * (4 + 5 + 6) / divisor
    ones = 2 * 3 / divisor
    start, after = [0.0, 10.0], [-first, 10 - ones]
    end = [-first - second, 10 - 2 * ones]
    assert history == [start, start, after, after, after, end, end]
    assert iterations == 7
    assert float(variables[1]) == 1 - first - second
    assert float(variables[2]) == 5.0  # it never had a gradient
    assert int(helper.counter) == 1


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_infinities_do_not_stay(in_function: bool):
    helper = LocalGradientAggregationHelperEager(2, _doubled, False, False)
    variables = [tf.Variable([0.0, 0.0])]
    passes = [[[np.inf, 1.0]], [[np.nan, 1.0]], [[1.0, 1.0]], [[1.0, 1.0]]]
    history, _ = _run_passes(helper, variables, passes, in_function)
    assert history[-1][1] == -8.0
    totals = [total.numpy().tolist() for total in helper._sums.values()]
    assert totals == [[0.0, 0.0]]


def test_one_pass_a_step_keeps_nothing():
    helper = LocalGradientAggregationHelperEager(1, _doubled, False, False)
    variables = [tf.Variable([0.0])]
    assert _run_passes(helper, variables, [[[1.0]], [[2.0]]], True) == ([[-2.0], [-6.0]], 2)
    assert helper.counter is None


def test_a_gradient_that_is_missing_in_some_passes_counts_as_zero():
    helper = LocalGradientAggregationHelperEager(2, _doubled, False, False)
    variables = [tf.Variable(0.0), tf.Variable(0.0)]
    _run_passes(helper, variables, [[1.0, 1.0], [1.0]], False)
    assert [float(variable) for variable in variables] == [-4.0, -2.0]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="must be positive, not 0"):
        LocalGradientAggregationHelperEager(0, _doubled, False, False)
    helper = LocalGradientAggregationHelperEager(2, _doubled, False, False)
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        helper.compute_gradients([slices], [tf.Variable(tf.zeros([3, 2]))])
    with pytest.raises(ValueError, match="compute_gradients"):
        helper.apply_gradients(lambda: None, None, [])


def test_embeddings_as_dense():
    helper = LocalGradientAggregationHelperEager(2, _doubled, True, False)
    variable = tf.Variable(tf.zeros([3, 1]))
    optimizer = _Optimizer()
    for index in (0, 2):
        slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([index]), tf.constant([3, 1]))
        pairs = list(zip(helper.compute_gradients([slices], [variable]), [variable], strict=True))
        helper.apply_gradients(
            lambda pairs=pairs: optimizer.apply_gradients(pairs), optimizer, pairs
        )
    assert variable.numpy().ravel().tolist() == [-2.0, 0.0, -2.0]


@pytest.mark.parametrize("v2_control_flow", [True, False])
def test_the_helper_of_graphs_with_an_optimizer_of_keras(v2_control_flow: bool):
    v1 = tf.compat.v1
    was_v2 = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if v2_control_flow else v1.disable_control_flow_v2)()
    try:
        with tf.Graph().as_default(), v1.Session() as session:
            helper = LocalGradientAggregationHelper(
                2,
                _doubled,
                False,
                False,
                rank=0,
                optimizer_type=LocalGradientAggregationHelper._OPTIMIZER_TYPE_KERAS,
            )
            optimizer = _GraphOptimizer()
            variable = v1.get_variable("v", initializer=[0.0, 0.0], use_resource=True)
            gradient = v1.placeholder(tf.float32, [2])
            (computed,) = helper.compute_gradients([gradient], [variable])
            pairs = [(computed, variable)]
            train = helper.apply_gradients(
                lambda: optimizer.apply_gradients(pairs), optimizer, pairs
            )
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            history = []
            for number in range(4):
                session.run(train, {gradient: [number, np.inf if number < 2 else 1.0]})
                history.append(session.run(variable).tolist())
            assert [first for first, _ in history] == [0.0, -2.0, -2.0, -12.0]
            assert int(session.run(optimizer.iterations)) == 4
    finally:
        (v1.enable_control_flow_v2 if was_v2 else v1.disable_control_flow_v2)()


class _GraphOptimizer:
    def __init__(self) -> None:
        self.iterations = tf.compat.v1.get_variable("iterations", initializer=0, use_resource=True)

    def apply_gradients(self, pairs: Any) -> Any:
        return tf.group(
            *[variable.assign_sub(gradient) for gradient, variable in pairs],
            self.iterations.assign_add(1),
        )


def _on_ranks(in_function: bool, scale: bool) -> tuple[list[Any], int]:
    """Two cycles of two passes; the first variable is shared, the second is this rank's own."""
    rank = hvd.rank()
    reduced: list[int] = []

    def reduce(gradients: list[Any], variables: list[Any]) -> list[Any]:
        reduced.append(len(gradients))
        return GradientReduction(OptimizerOptions(), "sums")(gradients, variables)

    helper = LocalGradientAggregationHelperEager(
        2, reduce, False, False, scale_local_gradients=scale
    )
    variables = [tf.Variable([0.0]), tf.Variable([0.0])]
    helper.register_local_var(variables[1])
    passes = [[[n * (rank + 1.0)], [n * (rank + 1.0)]] for n in range(1, 5)]
    history, iterations = _run_passes(helper, variables, passes, in_function)
    assert set(reduced) == {1}  # the shared one
    return [history, variables[1].numpy().tolist()], iterations


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("scale", [True, False])
def test_ranks_exchange_sums_and_keep_local_ones(
    tf_pool2: RankPool, in_function: bool, scale: bool
):
    history = [[0.0], [-4.5], [-4.5], [-15.0]]
    for rank, (seen, iterations) in enumerate(tf_pool2.run(_on_ranks, in_function, scale)):
        assert seen == [history, [-10.0 * (rank + 1) / (2 if scale else 1)]]
        assert iterations == 4
