"""Elastic states of TensorFlow, and a training that goes on when ranks come and go."""

from __future__ import annotations

import re
from typing import Any

import pytest

from horovod.common.exceptions import HorovodInternalError
from tests.elastic.training import this_worker
from tests.ranks import RankPool, start_ranks
from tests.runner.horovodrun import ROOT
from tests.tensorflow.growing import await_another, grow_and_lose, halt, lose_one_of_two

EXAMPLE = str(ROOT / "examples" / "elastic" / "tensorflow2_mnist_elastic.py")


# -- states ---------------------------------------------------------------------------------------


def _names() -> None:
    import horovod.tensorflow as hvd

    assert set(hvd.elastic.__all__) == {"TensorFlowKerasState", "TensorFlowState", "run"}


def _restored() -> None:
    """As often as needed, whatever TensorFlow has done with the memory in between."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    dtypes = [tf.float32, tf.bfloat16, tf.int64, tf.uint32, tf.bool, tf.complex64]
    variables = [tf.Variable(tf.cast([[1, 0]], dtype)) for dtype in dtypes]
    variables += [tf.Variable(3.0), tf.Variable(tf.zeros([0, 2]))]
    state = hvd.elastic.TensorFlowState(variables, step=1)
    variables[0].assign_add([[1.0, 1.0]])
    state.step = 2
    state.save()
    saved = [variable.numpy() for variable in variables]
    for _ in range(3):
        variables[0].assign_add([[5.0, 5.0]])  # in place
        variables[4].assign([[False, True]])
        variables[6].assign(7.0)
        state.step = 3
        state.restore()
        assert all((v.numpy() == old).all() for v, old in zip(variables, saved, strict=True))
        assert state.step == 2


def _synchronised() -> list[Any]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    small = tf.Variable(float(rank))
    large = tf.Variable(tf.fill([3, 100], tf.cast(rank + 0.5, tf.bfloat16)))
    state = hvd.elastic.TensorFlowState([small, large], step=10 + rank)
    state._root = 1  # the loop says whose state is the newest
    state.sync()
    small.assign_add(1.0)
    state.restore()  # to what was synchronised, without any commit
    return [small.numpy().item(), float(large[2, 99]), state.step]


def _different(rank: int, size: int) -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    values = [tf.Variable(0.0), tf.Variable(tf.zeros([2 + rank]), name="it")]
    hvd.elastic.TensorFlowState(values).sync()


def _what_is_missing() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    with pytest.raises(ValueError, match="pass the variables"):
        hvd.elastic.TensorFlowState(step=0)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)], name="unready")
    with pytest.raises(ValueError, match=r"'unready' has no variables yet: .*build\("):
        hvd.elastic.TensorFlowKerasState(model)


def _in_a_session() -> list[Any]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        for use_resource in (False, True):
            v1.get_variable(
                f"v{use_resource}", initializer=1.0 + hvd.rank(), use_resource=use_resource
            )
        v1.get_variable("short", initializer=tf.cast([1.0 + hvd.rank()], tf.bfloat16))
        increment = [
            v1.assign_add(variable, tf.ones_like(variable)) for variable in v1.global_variables()
        ]
        values = v1.global_variables()
        initialise = v1.global_variables_initializer()
        graph.finalize()  # as v1's training loops do
        with v1.Session() as session:
            session.run(initialise)
            state = hvd.elastic.TensorFlowState(session=session, step=hvd.rank())
            state.sync()
            session.run(increment)
            state.save()
            before = session.run(values)
            for _ in range(2):
                session.run(increment)
                state.restore()
                assert session.run(values) == before
            with_default = hvd.elastic.TensorFlowState()  # the session is the default one
            assert len(with_default.variables) == 3
        with pytest.raises(ValueError, match="pass the session"):
            hvd.elastic.TensorFlowState()
        return [*(value.item() for value in before), state.step]


def test_states(tf_pool2: RankPool):
    tf_pool2.run(_names)
    tf_pool2.run(_restored)
    tf_pool2.run(_what_is_missing)
    assert tf_pool2.run(_synchronised) == [[1.0, 1.5, 11]] * 2
    assert tf_pool2.run(_in_a_session) == [[2.0, 2.0, 2.0, 0]] * 2


def test_variables_that_differ_end_the_rank_that_cannot_take_the_others():
    with start_ranks(_different, 2) as ranks:
        first, second = ranks.wait()
    assert "rank 1 has the variable it:0 of type and shape ('float32', (3,))" in second.error
    assert "rank 0 has ('float32', (2,)) in its place" in second.error
    assert "PeerLostError: rank 1" in first.error


# -- errors ---------------------------------------------------------------------------------------


def _errors() -> list[str]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    @tf.function
    def mismatched() -> Any:
        return hvd.allreduce(tf.zeros([2 + hvd.rank()]), name="mismatched")

    def someone_elses() -> Any:
        raise KeyError("a bug")

    @tf.function
    def buggy() -> Any:
        return tf.py_function(someone_elses, [], tf.float32)

    def in_a_session() -> Any:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            session.run(hvd.allreduce(tf.zeros([2 + hvd.rank()]), name="mismatched"))

    messages = []
    for step, kind in (
        (mismatched, HorovodInternalError),
        (in_a_session, HorovodInternalError),
        (buggy, tf.errors.UnknownError),
    ):
        state = hvd.elastic.TensorFlowState([])
        with pytest.raises(kind) as caught:
            hvd.elastic.run(lambda state, step=step: step())(state)
        assert type(caught.value) is kind
        messages.append(str(caught.value))
    return messages


def test_errors_of_ours_are_found_in_those_of_a_graph_and_others_are_the_users(
    tf_pool2: RankPool,
):
    for *ours, users in tf_pool2.run(_errors):
        for text in ours:
            assert text.startswith("'allreduce.mismatched': mismatched shape between ranks: [2] on")
            assert "not recovered, because this job is not elastic" in text
            assert "Traceback" not in text
        assert "a bug" in users


# -- a tf.function outlives its ranks -------------------------------------------------------------


def _train_with_a_tape() -> dict[str, Any]:
    """Gradients differ between ranks, but their average does not depend on the ranks."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    weight = tf.Variable([1.0 + int(this_worker()[1:]), 2.0])
    momentum = tf.Variable(tf.zeros(2))

    @tf.function
    def step(share: Any) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = share * tf.reduce_sum((weight - [3.0, -1.0]) ** 2)
        momentum.assign(0.5 * momentum + tape.gradient(loss, weight))
        weight.assign_sub(0.1 * momentum)

    @hvd.elastic.run
    def train(state: Any) -> None:
        share = tf.constant(1.0 + 0.5 * (hvd.rank() - (hvd.size() - 1) / 2))
        while state.step < 10:
            step(share)
            state.step += 1
            if state.step == 3:
                await_another()
            elif state.step == 7 and this_worker() == "w0":
                halt()  # the other one is stuck in its next step
            if state.step % 2 == 0:
                state.commit()

    state = hvd.elastic.TensorFlowState([weight, momentum], step=0)
    train(state)
    reached = weight.numpy().tolist()
    weight.assign([1.0, 2.0])  # what w0 began with
    momentum.assign([0.0, 0.0])
    for _ in range(10):
        step(tf.constant(1.0))
    return {
        "weights": reached,
        "expected": weight.numpy().tolist(),
        "traces": step.experimental_get_tracing_count(),
        "size": hvd.size(),
    }


def test_a_function_that_was_traced_before_reduces_with_the_new_ranks():
    result = grow_and_lose(_train_with_a_tape)
    assert result["size"] == 1
    assert result["traces"] == 1
    assert result["weights"] == pytest.approx(result["expected"], abs=1e-5)


# -- the example ----------------------------------------------------------------------------------


def test_the_example_survives_a_kill_and_learns():
    short = ("--epochs", "4", "--lr", "0.003", "--target-accuracy", "0.8")
    output = lose_one_of_two(EXAMPLE, *short, when="epoch  1: ")
    epochs = [int(number) for number in re.findall(r"epoch +(\d): .* with 1 process", output)]
    assert epochs == [2, 3, 4], "it goes on from the last commit"
    assert "final test accuracy" in output
