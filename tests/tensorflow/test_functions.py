"""Variables and objects made equal on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import functions
from tests.ranks import RankPool, run_ranks

TYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
]
SHAPES: list[list[int]] = [[], [3], [0], [2, 3], [17]]


def _values(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [
        random.integers(0, 2 if name == "bool" else 100, shape).astype(
            tf.as_dtype(name).as_numpy_dtype
        )
        for name in TYPES
        for shape in SHAPES
    ]


def _all_types(inplace: bool) -> list[bytes]:
    variables = [tf.Variable(value) for value in _values(hvd.rank())]
    assert hvd.broadcast_variables(variables, 1, inplace=inplace) is None
    return [variable.numpy().tobytes() for variable in variables]


@pytest.mark.parametrize("inplace", [False, True])
def test_variables_of_all_types_and_shapes(tf_pool2: RankPool, inplace: bool):
    expected = [value.tobytes() for value in _values(1)]
    assert tf_pool2.run(_all_types, inplace) == [expected, expected]


def _in_small_parts() -> list[float]:
    functions._CHUNK = 100  # bytes; three kinds of parts: several variables, one, and a larger one
    shapes = [[3], [5], [2], [90], [1]]
    variables = [tf.Variable(tf.fill(shape, float(hvd.rank()))) for shape in shapes]
    try:
        hvd.broadcast_variables(variables, 1)
    finally:
        functions._CHUNK = 64 * 2**20
    return [float(tf.reduce_sum(variable)) for variable in variables]


def test_many_variables_go_in_parts(tf_pool2: RankPool):
    assert tf_pool2.run(_in_small_parts) == [[3.0, 5.0, 2.0, 90.0, 1.0]] * 2


def _keras() -> tuple[list[Any], bool]:
    rank = hvd.rank()
    if rank == 0:  # what a rank builds besides must not matter
        tf.keras.Sequential([tf.keras.layers.Dense(1)]).build((None, 1))
    tf.keras.utils.set_random_seed(rank)
    model = tf.keras.Sequential([tf.keras.layers.Dense(4), tf.keras.layers.Dropout(0.5)])
    model.build((None, 3))
    optimizer = tf.keras.optimizers.Adam(0.1 + rank)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], 0)
    seen = [np.asarray(v).tolist() for v in [*model.variables, *optimizer.variables]]
    return seen, np.isclose(float(optimizer.learning_rate), 0.1)


def test_variables_of_keras(tf_pool2: RankPool):
    (one, is_roots), (other, is_roots_too) = tf_pool2.run(_keras)
    assert one == other
    assert is_roots
    assert is_roots_too


def _in_a_function() -> list[float]:
    variables = [tf.Variable(float(hvd.rank())), tf.Variable([hvd.rank()] * 2, dtype=tf.float64)]

    @tf.function
    def synchronise() -> tf.Tensor:
        new = hvd.broadcast_(variables, 1, name="again")
        variables[0].assign_add(10.0)
        return tf.reduce_sum(new[1])

    total = float(synchronise())
    return [float(variables[0]), *variables[1].numpy(), total]


def test_inside_a_function_it_runs_in_its_place(tf_pool2: RankPool):
    assert tf_pool2.run(_in_a_function) == [[11.0, 1.0, 1.0, 2.0]] * 2


def _graph(use_resource: bool, form: str) -> list[float]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [
            tf.compat.v1.get_variable(
                name, initializer=float(hvd.rank() + offset), use_resource=use_resource
            )
            for name, offset in (("first", 0), ("second", 10))
        ]
        op = {
            "variables": lambda: hvd.broadcast_variables(variables, 1),
            "inplace": lambda: hvd.broadcast_variables(variables, 1, inplace=True),
            "global": lambda: hvd.broadcast_global_variables(1),
            "list": lambda: hvd.broadcast_(variables, 1),
        }[form]()
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(op)
        return [float(value) for value in session.run(variables)]


@pytest.mark.parametrize("form", ["variables", "inplace", "global", "list"])
@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_v1_graphs(tf_pool2: RankPool, use_resource: bool, form: str):
    assert tf_pool2.run(_graph, use_resource, form) == [[1.0, 11.0]] * 2


def _hook() -> list[list[float]]:
    hook = hvd.BroadcastGlobalVariablesHook(1, device="/cpu:0")
    seen = []
    for _ in range(2):  # one hook may serve several graphs
        with tf.Graph().as_default():
            variable = tf.compat.v1.get_variable("v", initializer=float(hvd.rank()))
            with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
                seen.append(float(session.run(variable)))
    return seen


def test_the_hook_of_sessions(tf_pool2: RankPool):
    assert tf_pool2.run(_hook) == [[1.0, 1.0]] * 2


def _refused() -> None:
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(ValueError, match=r"only variables .* not EagerTensor"):
        hvd.broadcast_variables([tf.ones(2)], 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="root rank 7") as caught:
        hvd.broadcast_variables([tf.Variable(1.0)], 7)
    assert isinstance(caught.value, ValueError)
    with tf.Graph().as_default():
        mixed = [
            tf.compat.v1.get_variable(f"v{i}", initializer=1.0, use_resource=bool(i))
            for i in (0, 1)
        ]
        with pytest.raises(ValueError, match="all resource variables or all reference"):
            hvd.broadcast_(mixed, 0)
    hvd.broadcast_variables([], 0)


def test_wrong_arguments(tf_pool2: RankPool):
    tf_pool2.run(_refused)


def _make(name: str, value: Any) -> tf.Variable:
    return tf.Variable(value, name=name)


DIFFERENCES = {
    "shape": ([("kernel", [1.0, 2.0])], [("kernel", [1.0])], "'kernel:0' .* shape \\[2\\]"),
    "type": ([("count", 1)], [("count", 1.0)], "'count:0' of type int32 .* type float32"),
    "name": ([("a", 1.0), ("b", 2.0)], [("b", 1.0), ("a", 2.0)], "number 0 is 'a:0'"),
    "count": ([("a", 1.0)], [("a", 1.0), ("extra", 1.0)], "1 and 2 of them; .* 'extra:0'"),
    "none": ([], [("a", 1.0)], "0 and 1 of them; .* 'a:0'"),
}


def _different(kind: str, eager: bool) -> str:
    *mine, pattern = DIFFERENCES[kind]
    variables = [_make(*pair) for pair in mine[hvd.rank()]]
    before = [variable.numpy().tolist() for variable in variables]
    if eager:
        with pytest.raises(tf.errors.FailedPreconditionError, match=pattern) as caught:
            hvd.broadcast_variables(variables, 1)
        assert isinstance(caught.value, HorovodInternalError)
    else:

        @tf.function
        def synchronise() -> None:
            hvd.broadcast_variables(variables, 1)

        with pytest.raises(tf.errors.FailedPreconditionError, match=pattern) as caught:
            synchronise()
        assert "HorovodInternalError" in str(caught.value)
    assert [variable.numpy().tolist() for variable in variables] == before
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == hvd.size()  # the job goes on
    return str(caught.value)


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_variables_that_differ_between_ranks_are_named(tf_pool2: RankPool, kind: str):
    one, other = tf_pool2.run(_different, kind, True)
    assert one == other
    assert "between ranks 0 and 1" in one
    assert "No variable was changed" in one


def test_variables_that_differ_in_a_graph(tf_pool2: RankPool):
    tf_pool2.run(_different, "shape", False)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("dense/kernel:0", "dense_12/kernel:0", True),
        ("adam/dense_3_kernel_momentum", "adam_1/dense_kernel_momentum", True),
        ("dense/kernel:0", "dense/kernel", True),
        ("conv2d/kernel", "conv1d/kernel", False),
        ("dense/kernel", "dense/bias", False),
    ],
)
def test_numbers_that_frameworks_append_are_not_compared(one: str, other: str, same: bool):
    assert (functions._without_numbers(one) == functions._without_numbers(other)) is same


# -- objects --------------------------------------------------------------------------------


def _objects() -> list[Any]:
    rank = hvd.rank()
    mine = {"rank": rank, "values": np.arange(rank + 1)}
    received = hvd.broadcast_object(mine, 1)
    assert (received is mine) == (rank == 1)
    send = hvd.broadcast_object_fn(0, name="again")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        in_graph = hvd.broadcast_object(rank, 1, session=session, name="graph")
        gathered = hvd.allgather_object("x" * rank, session=session)
    return [received["values"].tolist(), send(rank), send(rank + 5), in_graph, gathered]


def test_objects(tf_pool2: RankPool):
    assert tf_pool2.run(_objects) == [[[0, 1], 0, 5, 1, ["", "x"]]] * 2


def _unpicklable() -> str:
    bad = threading.Lock() if hvd.rank() == 1 else None
    with pytest.raises((TypeError, ValueError)) as caught:
        hvd.allgather_object(bad)
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    return str(caught.value)


def test_an_object_that_cannot_be_pickled(tf_pool2: RankPool):
    one, other = tf_pool2.run(_unpicklable)
    assert one.startswith("rank 1 could not pickle its object: TypeError: cannot pickle")
    assert "lock" in other


# -- the state of the engine ----------------------------------------------------------------


def _not_initialised(rank: int, size: int) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: hvd.broadcast_variables([tf.Variable(1.0)], 0),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
    ]
    for call in calls:
        with pytest.raises(tf.errors.FailedPreconditionError, match="not initialised") as caught:
            call()
        assert isinstance(caught.value, HorovodInternalError)
    hvd.init()
    hvd.shutdown()
    for call in calls:
        with pytest.raises(tf.errors.FailedPreconditionError, match="not initialised"):
            call()


def test_before_init_and_after_shutdown():
    run_ranks(_not_initialised, 1)


def _process_sets(rank: int, size: int) -> Any:
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    variable = tf.Variable(float(rank))
    if rank == 1:
        with pytest.raises(tf.errors.InvalidArgumentError, match="does not belong"):
            hvd.broadcast_variables([variable], 2, process_set=pair)
        return float(variable)
    hvd.broadcast_variables([variable], 2, process_set=pair)
    objects = hvd.allgather_object(rank, process_set=pair)
    root = hvd.broadcast_object(rank, 2, process_set=pair)
    return float(variable), objects, root


def test_process_sets():
    assert run_ranks(_process_sets, 3) == [(2.0, [0, 2], 2), 1.0, (2.0, [0, 2], 2)]
