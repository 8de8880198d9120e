"""Bad input: which error, on which ranks, eager and in graphs; and afterwards the job works."""

from __future__ import annotations

import functools
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.common.exceptions import HorovodInternalError, raise_our_errors
from horovod.engine.runtime import runtime
from horovod.tensorflow.ops import python_op
from tests.ranks import RankPool, listen, run_ranks, start_ranks, tell

SIZE = 3
ones = tf.ones
errors = tf.errors


def _by_rank(*choices: Any) -> Any:
    return choices[min(hvd.rank(), len(choices) - 1)]


def _works() -> bool:
    """Collectives of every kind still work on all ranks."""
    total = float(hvd.allreduce(1.0, op=hvd.Sum))
    total += float(hvd.allreduce(1.0, name="e", op=hvd.Sum))
    total += float(tf.reduce_sum(hvd.allgather(ones(1), name="e")))
    total += float(tf.reduce_sum(hvd.alltoall(ones(SIZE), name="e")))
    total += float(tf.reduce_sum(hvd.reducescatter(ones(SIZE), name="e", op=hvd.Sum)))
    total += float(hvd.broadcast(1.0, 0, name="e"))
    return total == 5.0 * SIZE + 1


# A wrong argument: raised where it was passed, before anything is sent.
LOCAL: dict[str, tuple[str, Callable[[], Any]]] = {
    "op and average": (
        "either op or average",
        lambda: hvd.allreduce(1.0, average=True, op=hvd.Sum),
    ),
    "unknown op": ("op must be", lambda: hvd.allreduce(1.0, op=17)),
    "unknown op of a group": ("op must be", lambda: hvd.grouped_allreduce([1.0], op="sum")),
    "average of bool": (r"Average.*tf\.bool", lambda: hvd.allreduce([True], name="e")),
    "minimum of complex": (
        r"Min.*tf\.complex64",
        lambda: hvd.allreduce(tf.constant(1j, tf.complex64), op=hvd.Min),
    ),
    "scaled bool": (
        r"tf\.bool",
        lambda: hvd.allreduce([True], op=hvd.Sum, prescale_factor=2.0),
    ),
    "sum of uint16": (
        r"Sum.*tf\.uint16",
        lambda: hvd.allreduce(tf.constant([1], tf.uint16), op=hvd.Sum),
    ),
    "bad member of a group": (r"tf\.bool", lambda: hvd.grouped_allreduce([ones(2), [True]])),
    "text": ("string", lambda: hvd.allgather(["text"])),
    "no tensor": ("not a tensor", lambda: hvd.broadcast(object(), 0)),
    "one tensor as a group": ("list", lambda: hvd.grouped_allreduce(ones(2))),
    "one variable as a group": ("list", lambda: hvd.grouped_allgather(tf.Variable([1.0]))),
    "root outside": ("root", lambda: hvd.broadcast(1.0, SIZE)),
    "negative root": ("root", lambda: hvd.broadcast(1.0, -1)),
    "gathered scalar": ("at least one dimension", lambda: hvd.allgather(1.0)),
    "scattered scalar": ("at least one dimension", lambda: hvd.reducescatter(1.0)),
    "exchanged scalar": ("at least one dimension", lambda: hvd.alltoall(1.0)),
    "splits of floats": (r"int32.*tf\.float32", lambda: hvd.alltoall(ones(3), ones(SIZE))),
    "splits of int64": (
        r"int32.*tf\.int64",
        lambda: hvd.alltoall(ones(3), tf.ones(SIZE, tf.int64)),
    ),
    "splits of two dimensions": (
        "one dimension",
        lambda: hvd.alltoall(ones(3), tf.ones([1, SIZE], tf.int32)),
    ),
    "too few splits": ("one split for each", lambda: hvd.alltoall(ones(3), [1, 2])),
    "too large splits": ("sum up to", lambda: hvd.alltoall(ones(3), [1, 1, 2])),
    "negative splits": ("negative", lambda: hvd.alltoall(ones(3), [-1, 1, 1])),
    "no equal parts": ("divisible", lambda: hvd.alltoall(ones(4))),
    "unregistered set": (
        "not registered",
        lambda: hvd.allreduce(1.0, process_set=hvd.ProcessSet([0, 1])),
    ),
}

# What ranks disagree about: raised on all of them.
MISMATCHES: dict[str, tuple[str, Callable[[], Any]]] = {
    "shape": ("shape", lambda: hvd.allreduce(ones(_by_rank(2, 2, 3)), name="e")),
    "rank": ("shape", lambda: hvd.broadcast(ones(_by_rank([2, 2], [4])), 0, name="e")),
    "dtype": (
        "dtype",
        lambda: hvd.allreduce(ones(2, _by_rank(tf.float32, tf.float64)), name="e"),
    ),
    "op": ("reduction", lambda: hvd.allreduce(1.0, op=_by_rank(hvd.Sum, hvd.Max), name="e")),
    "factor": (
        "prescale factor",
        lambda: hvd.allreduce(1.0, op=hvd.Sum, prescale_factor=_by_rank(1.0, 2.0), name="e"),
    ),
    "root": ("root rank", lambda: hvd.broadcast(1.0, _by_rank(0, 1), name="e")),
    "columns": ("shape", lambda: hvd.allgather(ones([1, _by_rank(2, 3)]), name="e")),
    "exchanged columns": (
        "shape",
        lambda: hvd.alltoall(ones([SIZE, _by_rank(2, 3)]), name="e"),
    ),
    "scattered rows": ("shape", lambda: hvd.reducescatter(ones(_by_rank(3, 4)), name="e")),
    "members of a group": (
        "dtype|shape",
        lambda: hvd.grouped_allreduce([1.0] * _by_rank(2, 3), name="e"),
    ),
    "operation": (
        "different operations|operation",
        lambda: _by_rank(hvd.allreduce, hvd.allgather)(ones(2), name="e"),
    ),
}


def _as_session(call: Callable[[], Any]) -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(call())


MODES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "eager": lambda call: call(),
    "function": lambda call: tf.function(call, autograph=False)(),
    "session": _as_session,
}


def _raise(mode: str, cases: dict[str, tuple[str, Callable[[], Any]]]) -> list[tuple[str, Any]]:
    found = []
    for case, (_, call) in cases.items():
        try:
            MODES[mode](call)
        except Exception as error:
            assert float(hvd.allreduce(1.0, op=hvd.Sum)) == SIZE, case
            # Classes of a function's error come from TensorFlow, whatever module they are in.
            names = {each.__name__ for each in type(error).__mro__}
            found.append((case, (names, str(error))))
    assert _works()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_wrong_arguments(tf_pool3: RankPool, mode: str):
    for found in tf_pool3.run(_raise, mode, LOCAL):
        assert [case for case, _ in found] == list(LOCAL)
        for case, (names, text) in found:
            # A set that does not exist is noticed while the graph is built, before there is an op.
            if case != "unregistered set" or mode == "eager":
                assert "InvalidArgumentError" in names, (case, names)
            if case == "unregistered set" or mode == "eager":
                assert "ValueError" in names, (case, names)
            assert re.search(LOCAL[case][0], text, re.DOTALL), (case, text)


def test_ranks_that_do_not_agree(tf_pool3: RankPool):
    """The class is the same everywhere, and a graph's text has all that an eager call says."""
    said = dict(tf_pool3.run(_raise, "eager", MISMATCHES)[0])
    for mode in MODES:
        for found in tf_pool3.run(_raise, mode, MISMATCHES):
            assert [case for case, _ in found] == list(MISMATCHES)
            for case, (names, text) in found:
                assert "FailedPreconditionError" in names, (mode, case, names)
                assert re.search(MISMATCHES[case][0], text), (mode, case, text)
                if mode == "eager":
                    assert "HorovodInternalError" in names, case
                else:
                    assert f"\nHorovodInternalError: {said[case][1]}\n" in text, (mode, case)


def _disagree() -> tf.Tensor:
    """An op that fails on all of two or three ranks."""
    return tf.reduce_sum(hvd.allreduce(ones(2 + hvd.rank()), name="differs"))


def _in_a_gradient() -> Any:
    @tf.custom_gradient
    def identity(x):
        return x, lambda upstream: upstream * _disagree()

    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = identity(x)
    return tape.gradient(y, x)


def _in_fit() -> Any:
    def loss(wanted, found):
        return tf.reduce_mean(found - wanted) + _disagree()

    model = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(), loss=loss, jit_compile=False)
    return model.fit(ones([4, 1]), ones([4, 1]), verbose=0)


def _in_another_thread() -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(tf.function(_disagree)).result()


def _in_a_group() -> Any:
    tensors = [ones(2 + hvd.rank()), tf.ones(2, tf.int64), tf.ones(3, tf.bfloat16)]
    return hvd.grouped_allreduce(tensors, op=hvd.Sum, name="differs")


_function = functools.partial(tf.function, autograph=False)

INSIDE: dict[str, Callable[[], Any]] = {
    "a nested function": _function(lambda: 2.0 * _function(_disagree)()),
    "a branch": _function(lambda: tf.cond(tf.random.uniform([]) < 2, _disagree, lambda: 0.0)),
    "a loop": _function(
        lambda: tf.while_loop(lambda x: x < 9, lambda x: (x + _disagree(),), (tf.constant(0.0),))
    ),
    "a gradient": _function(_in_a_gradient),
    "a dataset": lambda: list(tf.data.Dataset.range(1).map(lambda _: _disagree())),
    "a thread": _in_another_thread,
    "a group": _function(_in_a_group),
    "fit": _in_fit,
}


def _disagree_inside(place: str) -> None:
    call = INSIDE[place]
    for _ in range(2):
        with pytest.raises(errors.FailedPreconditionError) as caught:
            call()
        said = r"\nHorovodInternalError: 'allreduce.*differs.*mismatched shape.*\[2\].* on rank 0 "
        assert re.search(said, caught.value.message), (place, caught.value.message)
        assert float(hvd.allreduce(1.0, op=hvd.Sum)) == 2.0, place


@pytest.mark.parametrize("place", INSIDE)
def test_ranks_that_do_not_agree_inside_of(tf_pool2: RankPool, place: str):
    tf_pool2.run(_disagree_inside, place)


def _disagree_often() -> int:
    """The number of threads that this makes, and that do not end."""
    step = tf.function(_disagree)
    for count in range(40):
        if count == 10:  # by then TensorFlow has all of its own
            before = len(os.listdir("/proc/self/task"))
        with pytest.raises(errors.FailedPreconditionError):
            step()
    deadline = time.monotonic() + 60
    while (more := len(os.listdir("/proc/self/task")) - before) >= 10:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)  # they may not have had the processor yet
    return more


def test_failures_leave_no_threads(tf_pool2: RankPool):
    for more in tf_pool2.run(_disagree_often):
        assert more < 10


def _disagree_where_unsupported() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python_op, "new_executor", None)  # as where the import failed
        with pytest.raises(errors.UnknownError) as caught:
            tf.function(_disagree)()
    with pytest.raises(HorovodInternalError, match="mismatched shape"), raise_our_errors():
        raise caught.value  # elastic training finds it
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == 2.0
    return caught.value.message


def test_where_tensorflow_lets_us_raise_less(tf_pool2: RankPool):
    for message in tf_pool2.run(_disagree_where_unsupported):
        assert "HorovodInternalError: 'allreduce.differs': mismatched shape" in message


def test_reducescatter_knows_sum_and_average(tf_pool3: RankPool):
    def refuse() -> bool:
        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
            with pytest.raises(errors.AbortedError, match="Sum or Average"):
                hvd.reducescatter(ones(3), op=op)
            with pytest.raises(HorovodInternalError, match="Sum or Average"):
                tf.function(lambda op=op: hvd.grouped_reducescatter([ones(3)], op=op))()
        return _works()

    assert all(tf_pool3.run(refuse))


def _use_a_name_twice() -> tuple[float, bool]:
    if hvd.rank() != 0:
        hvd.broadcast(0, 0, name="the others may come")
        return float(hvd.allreduce(1.0, op=hvd.Sum, name="twice")), _works()
    results: list[float] = []

    def first() -> None:
        results.append(float(hvd.allreduce(1.0, op=hvd.Sum, name="twice")))

    thread = threading.Thread(target=first)
    thread.start()
    while not any(r.name == "allreduce.twice" for r in runtime.channel(0).pending()):
        time.sleep(0.001)
    with pytest.raises(errors.InvalidArgumentError, match="has not finished"):
        hvd.allreduce(1.0, op=hvd.Sum, name="twice")
    for mode in ("function", "session"):
        with pytest.raises(errors.InvalidArgumentError, match="has not finished"):
            MODES[mode](lambda: hvd.allreduce(1.0, op=hvd.Sum, name="twice"))
    hvd.broadcast(0, 0, name="the others may come")
    thread.join()
    return results[0], _works()


def test_a_name_that_is_in_use(tf_pool3: RankPool):
    """The second is refused at once; the first goes on when the others come."""
    assert tf_pool3.run(_use_a_name_twice) == [(3.0, True)] * 3


def test_errors_can_be_sent_and_shown_by_autograph(tf_pool2: RankPool):
    def raised() -> list[Any]:
        found: list[Any] = []
        try:
            hvd.broadcast(1.0, 77)
        except errors.InvalidArgumentError as error:
            copy = pickle.loads(pickle.dumps(error))
            found.append((type(copy) is type(error), "77" in copy.message))

        @tf.function
        def step(x):
            return hvd.allreduce(x)

        with pytest.raises(errors.InvalidArgumentError, match="string"):
            step(tf.constant("text"))
        return found

    assert tf_pool2.run(raised) == [[(True, True)]] * 2


# -- not initialised, shut down, lost ----------------------------------------------------------


def _not_initialised(rank: int, size: int) -> list[Any]:
    calls = {
        "allreduce": lambda: hvd.allreduce(1.0),
        "allgather": lambda: hvd.allgather([1.0]),
        "broadcast": lambda: hvd.broadcast(1.0, 0),
        "alltoall": lambda: hvd.alltoall([1.0]),
        "reducescatter": lambda: hvd.reducescatter([1.0]),
        "join": hvd.join,
        "size_op": hvd.size_op,
        "rank_op": hvd.rank_op,
        "local_rank_op": hvd.local_rank_op,
        "local_size_op": hvd.local_size_op,
    }
    for name, call in calls.items():
        with pytest.raises(errors.FailedPreconditionError, match="not initialised") as caught:
            call()
        assert isinstance(caught.value, HorovodInternalError), name
        for mode in ("function", "session"):
            with pytest.raises(errors.FailedPreconditionError, match="not initialised") as caught:
                MODES[mode](call)
            assert "\nHorovodInternalError: Horovod is not initialised" in caught.value.message
    for question in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size):
        with pytest.raises(ValueError, match="not initialised"):
            question()
    assert not hvd.is_initialized()
    return [int(hvd.process_set_included_op()), int(tf.function(hvd.process_set_included_op)())]


def test_not_initialised():
    assert run_ranks(_not_initialised, 1) == [[-1, -1]]


def _shut_down_by_another(rank: int, size: int) -> bool:
    hvd.init()
    hvd.allreduce(1.0)
    if rank == 1:
        hvd.shutdown()
        return True
    with pytest.raises(errors.AbortedError) as caught:
        hvd.allreduce(1.0)
    for mode in ("function", "session"):
        with pytest.raises(errors.UnknownError, match="HorovodInternalError: "):
            MODES[mode](lambda: hvd.allreduce(1.0))
    return isinstance(caught.value, HorovodInternalError)


def test_shut_down_by_another_rank():
    assert run_ranks(_shut_down_by_another, 2) == [True, True]


def _lose_a_rank(rank: int, size: int) -> str:
    hvd.init()
    step = tf.function(lambda: hvd.allreduce(1.0, name="step"))
    step()
    if rank == 1:
        listen()  # it is killed here
    tell("has stepped")
    with pytest.raises(errors.UnknownError, match="HorovodInternalError") as caught:
        step()
    with pytest.raises(errors.UnknownError, match=r"HorovodInternalError: .*rank 1"):
        _as_session(lambda: hvd.allreduce(1.0))
    with pytest.raises(errors.AbortedError, match="rank 1"):
        hvd.allreduce(1.0)
    return caught.value.message


def test_a_lost_rank():
    with start_ranks(_lose_a_rank, 2) as ranks:
        ranks.heard(0)
        ranks.signal(1, signal.SIGKILL)
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.error is None, outcome.describe()
        assert "rank 1" in outcome.result
