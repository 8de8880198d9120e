"""DistributedGradientTape: whose gradients it returns, and how they travel."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.tensorflow as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.ranks import RankPool, run_ranks


def _num_collectives(function: Any) -> int:
    """How many operations of ours a traced function has."""
    operations = function.get_concrete_function().graph.get_operations()
    return sum(operation.type == "EagerPyFunc" for operation in operations)


def _weighted(sources: list[Any], weights: list[Any]) -> tf.Tensor:
    """A loss whose gradients are the weights."""
    products = [
        tf.cast(tf.reduce_sum(source * tf.cast(weight, source.dtype)), tf.float64)
        for source, weight in zip(sources, weights, strict=True)
    ]
    return tf.add_n(products)


# -- any gradients, against numpy -----------------------------------------------------------

SHAPES = st.sampled_from([(), (1,), (3,), (2, 5), (0,), (33,)])
CASES = st.fixed_dictionaries(
    {
        "forms": st.lists(
            st.tuples(SHAPES, st.sampled_from(["float32", "float64", "float16"]), st.booleans()),
            min_size=1,
            max_size=7,
        ),
        "op": st.sampled_from([hvd.Average, hvd.Sum]),
        "groups": st.sampled_from([None, 1, 2, 3, "lists"]),
        "predivide": st.sampled_from([1.0, 2.0, 0.5]),
        "local": st.sets(st.integers(0, 6), max_size=2),
        "scale": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
)


def _check_case(case: dict[str, Any], in_function: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    random = np.random.default_rng(case["seed"])
    # Small whole numbers, so that no order of summation and no halving makes a difference.
    values = [
        [random.integers(-8, 9, shape).astype(dtype) for _ in range(size)]
        for shape, dtype, _ in case["forms"]
    ]
    sources = [tf.Variable(tf.zeros(shape, dtype)) for shape, dtype, _ in case["forms"]]
    used = [is_used for _, _, is_used in case["forms"]]
    used[0] = True
    chosen = [i for i, is_used in enumerate(used) if is_used]
    groups = case["groups"]
    if groups == "lists":
        groups = [sources[0:2], sources[3:4]]
    predivide = case["predivide"] if case["op"] == hvd.Average else 1.0

    def gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = _weighted([sources[i] for i in chosen], [values[i][rank] for i in chosen])
        distributed = hvd.DistributedGradientTape(
            tape,
            op=case["op"],
            groups=groups,
            gradient_predivide_factor=predivide,
            scale_local_gradients=case["scale"],
        )
        for index in case["local"] & set(range(len(sources))):
            distributed.register_local_source(sources[index])
        return distributed.gradient(loss, sources)

    results = tf.function(gradients)() if in_function else gradients()
    for index, result in enumerate(results):
        if not used[index]:
            assert result is None
            continue
        if index in case["local"]:
            expected = values[index][rank] / (size if case["scale"] else 1)
        else:
            expected = sum(values[index]) / (size if case["op"] == hvd.Average else 1)
        assert result.dtype == sources[index].dtype
        np.testing.assert_array_equal(result.numpy(), expected.astype(result.numpy().dtype))


def _many_cases(in_function: bool, max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None, database=None, derandomize=True)
    @given(CASES)
    def check(case: dict[str, Any]) -> None:
        _check_case(case, in_function)

    check()


def test_any_gradients_eagerly(tf_pool2: RankPool):
    tf_pool2.run(_many_cases, False, 60)


def test_any_gradients_in_functions(tf_pool2: RankPool):
    tf_pool2.run(_many_cases, True, 8)


def test_any_gradients_on_three_ranks(tf_pool3: RankPool):
    tf_pool3.run(_check_case, _THREE, False)
    tf_pool3.run(_check_case, _THREE, True)


_THREE = {
    "forms": [((2, 3), "float32", True), ((), "float64", True), ((4,), "float32", False)],
    "op": hvd.Sum,
    "groups": None,
    "predivide": 1.0,
    "local": set(),
    "scale": True,
    "seed": 5,
}


# -- how they travel ------------------------------------------------------------------------


def _operations(groups: Any) -> int:
    sources = [tf.Variable(tf.zeros(3, dtype)) for dtype in ("float32", "float64", "float16")]
    if groups == "lists":
        groups = [sources[1:]]

    @tf.function
    def gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = _weighted(sources, [1.0] * 3)
        return hvd.DistributedGradientTape(tape, groups=groups).gradient(loss, sources)

    return _num_collectives(gradients)


def _same_source_twice() -> list[float]:
    x, y = tf.Variable(1.0), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = (x + y) * (hvd.rank() + 1.0)
    tape = hvd.DistributedGradientTape(tape, groups=[[x, y]])
    return [float(gradient) for gradient in tape.gradient(loss, [x, y, x])]


def test_a_source_may_come_twice(tf_pool2: RankPool):
    assert tf_pool2.run(_same_source_twice) == [[1.5] * 3] * 2


@pytest.mark.parametrize(("groups", "number"), [(None, 1), (1, 1), (2, 2), (9, 3), ("lists", 2)])
def test_all_gradients_are_one_operation_or_one_for_each_group(
    tf_pool2: RankPool, groups: Any, number: int
):
    assert tf_pool2.run(_operations, groups) == [number] * 2


def _deprecated_groups() -> list[float]:
    variables = [tf.Variable(1.0), tf.Variable(2.0)]
    with tf.GradientTape() as tape:
        loss = _weighted(variables, [hvd.rank(), 4.0])
    with pytest.warns(DeprecationWarning, match="groups"):
        distributed = hvd.DistributedGradientTape(tape, num_groups=2)
    return [float(gradient) for gradient in distributed.gradient(loss, variables)]


def test_num_groups_is_the_older_form(tf_pool2: RankPool):
    assert tf_pool2.run(_deprecated_groups) == [[0.5, 4.0]] * 2


def _compressed(kind: str) -> tuple[str, list[float]]:
    variable = tf.Variable([1.0, 1.0])
    with tf.GradientTape() as tape:
        loss = _weighted([variable], [[1.0 + hvd.rank() * 2.0, 1.0 + 2.0**-9]])
    compression = getattr(hvd.Compression, kind)
    result = hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, variable)
    return result.dtype.name, result.numpy().tolist()


@pytest.mark.parametrize(
    ("kind", "second"), [("none", 1 + 2.0**-9), ("fp16", 1 + 2.0**-9), ("bf16", 1.0)]
)
def test_compression(tf_pool2: RankPool, kind: str, second: float):
    assert tf_pool2.run(_compressed, kind) == [("float32", [2.0, second])] * 2


# -- embeddings -----------------------------------------------------------------------------


def _embeddings(in_function: bool, **arguments: Any) -> Any:
    rank = hvd.rank()
    table, dense = tf.Variable(tf.zeros([4, 2])), tf.Variable(0.0)
    indices = [0, 3] if rank == 0 else [3]

    def gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            found = tf.nn.embedding_lookup(table, indices)
            loss = tf.reduce_sum(found) * (rank + 1.0) + dense
        return hvd.DistributedGradientTape(tape, **arguments).gradient(loss, [table, dense])

    slices, other = tf.function(gradients)() if in_function else gradients()
    assert float(other) == (1.0 if arguments.get("op") != hvd.Sum else 2.0)
    kind = type(slices).__name__
    return kind, tf.convert_to_tensor(slices).numpy().tolist()


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_of_embeddings(tf_pool2: RankPool, in_function: bool, op: Any):
    total = np.array([[1, 1], [0, 0], [0, 0], [3, 3]]) / (2 if op == hvd.Average else 1)
    for kind, values in tf_pool2.run(_with, _embeddings, in_function, {"op": op}):
        assert kind == "IndexedSlices"
        assert values == total.tolist()


def _with(function: Any, argument: Any, keywords: dict[str, Any]) -> Any:
    return function(argument, **keywords)


def test_gradients_of_embeddings_as_dense(tf_pool2: RankPool):
    for in_function in (False, True):
        results = tf_pool2.run(_with, _embeddings, in_function, {"sparse_as_dense": True})
        assert {kind for kind, _ in results} == {"EagerTensor"}
        assert results[0] == results[1]


def _adasum() -> list[float]:
    variable = tf.Variable([1.0, 1.0])
    with tf.GradientTape() as tape:
        loss = _weighted([variable], [[1.0, 0.0] if hvd.rank() else [3.0, 4.0]])
    return (
        hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, variable).numpy().tolist()
    )


def test_adasum_of_gradients(tf_pool2: RankPool):
    # (1 - 3 / (2 * 25)) [3, 4] + (1 - 3 / (2 * 1)) [1, 0]
    for result in tf_pool2.run(_adasum):
        np.testing.assert_allclose(result, [0.94 * 3 - 0.5, 0.94 * 4], rtol=1e-6)


def _sparse_adasum() -> None:
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        _embeddings(False, op=hvd.Adasum)


def test_adasum_does_not_take_slices(tf_pool2: RankPool):
    tf_pool2.run(_sparse_adasum)


# -- it is a tape ---------------------------------------------------------------------------


def _uses() -> None:
    rank = hvd.rank()
    x, unused = tf.Variable(3.0), tf.Variable(1.0)

    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:  # wrapped before it records
        y = x * x * (rank + 1.0)
    assert isinstance(tape, tf.GradientTape)
    assert [v.ref() for v in tape.watched_variables()] == [x.ref()]
    assert float(tape.gradient(y, x)) == 9.0
    with pytest.raises(RuntimeError, match="only be used to compute one set"):
        tape.gradient(y, x)

    with tf.GradientTape() as plain:  # ... and while it does
        tape = hvd.DistributedGradientTape(plain)
        y = x * x * (rank + 1.0)
        with tape.stop_recording():
            forgotten = x * 5.0
    assert [None if g is None else float(g) for g in tape.gradient([y, forgotten], [x])] == [9.0]

    with tf.GradientTape(persistent=True) as plain:
        y = x * x * (rank + 1.0)
        z = x * (rank + 1.0)
    tape = hvd.DistributedGradientTape(plain)
    assert float(tape.gradient(y, x)) == 9.0
    assert float(plain.gradient(z, x)) == rank + 1.0
    assert float(tape.jacobian(z, x)) == rank + 1.0
    found = tape.gradient({"y": y}, {"a": [x, unused]})
    assert float(found["a"][0]) == 9.0
    assert found["a"][1] is None
    zero = tape.gradient(z, [x, unused], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    assert [float(value) for value in zero] == [1.5, 0.0]
    weighted = tape.gradient([y, z], [x], output_gradients=[tf.constant(2.0), tf.constant(10.0)])
    assert float(weighted[0]) == 2 * 9.0 + 10 * 1.5
    assert float(tape.gradient(z, x, use_generic_names=True)) == 1.5

    with tf.GradientTape() as tape:
        tape.watch(w := tf.constant([1.0, 2.0]))
        y = tf.reduce_sum(w * w) * (rank + 1.0)
    assert hvd.DistributedGradientTape(tape).gradient(y, w).numpy().tolist() == [3.0, 6.0]


def test_every_use_of_a_tape(tf_pool2: RankPool):
    tf_pool2.run(_uses)


def _nested(in_function: bool) -> float:
    x = tf.Variable(2.0)

    def second_derivative() -> tf.Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = x**3 * (hvd.rank() + 1.0)
            first = hvd.DistributedGradientTape(inner).gradient(y, x)
        return hvd.DistributedGradientTape(outer).gradient(first, x)

    return float(tf.function(second_derivative)() if in_function else second_derivative())


@pytest.mark.parametrize("in_function", [False, True])
def test_gradients_of_gradients(tf_pool2: RankPool, in_function: bool):
    # d/dx of the average of 3 x^2 (r + 1), averaged: an average's gradient is an average too.
    assert tf_pool2.run(_nested, in_function) == [18.0, 18.0]


# -- local sources --------------------------------------------------------------------------


def _local_layers(scale: bool) -> tuple[list[float], list[float]]:
    rank = hvd.rank()
    mine = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    shared = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = tf.keras.Sequential([mine, shared])
    model.build((None, 1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.constant([[rank + 1.0]])))
    distributed = hvd.PartialDistributedGradientTape(
        tape, local_layers=mine, scale_local_gradients=scale
    )
    local, others = distributed.get_local_and_global_gradients(loss, model.trainable_variables)
    assert [pair[0].path for pair in local] == [mine.kernel.path]
    assert [pair[0].path for pair in others] == [shared.kernel.path]
    return [float(pair[1][0, 0]) for pair in local], [float(pair[1][0, 0]) for pair in others]


@pytest.mark.parametrize("scale", [True, False])
def test_local_layers(tf_pool2: RankPool, scale: bool):
    divisor = 2 if scale else 1
    assert tf_pool2.run(_local_layers, scale) == [([(r + 1) / divisor], [1.5]) for r in (0, 1)]


def _local_slices() -> list[list[float]]:
    table = tf.Variable(tf.zeros([3, 1]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [hvd.rank()]))
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(table)
    return tf.convert_to_tensor(tape.gradient(loss, table)).numpy().ravel().tolist()


def test_local_embeddings(tf_pool2: RankPool):
    assert tf_pool2.run(_local_slices) == [[0.5, 0.0, 0.0], [0.0, 0.5, 0.0]]


# -- process sets ---------------------------------------------------------------------------


def _process_sets(rank: int, size: int) -> list[list[float]]:
    pair, single = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])
    hvd.init(process_sets=[pair, single])
    x, local = tf.Variable(1.0), tf.Variable(1.0)

    def gradients(chosen: hvd.ProcessSet) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = (x + local) * (rank + 1.0)
        tape = hvd.DistributedGradientTape(tape, process_set=chosen)
        tape.register_local_source(local)
        return tape.gradient(loss, [x, local])

    return [
        [float(gradient) for gradient in call(chosen)]
        for chosen in (pair, single)
        for call in (gradients, tf.function(gradients))
    ]


def test_a_process_set_leaves_other_ranks_alone():
    one, two, three = run_ranks(_process_sets, 3)
    assert one == [[2.0, 0.5]] * 2 + [[1.0, 1.0]] * 2
    assert two == [[2.0, 2.0]] * 4
    assert three == [[2.0, 1.5]] * 2 + [[3.0, 3.0]] * 2


# -- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op=Average"),
        ({"gradient_predivide_factor": 0.0}, "positive number, not 0.0"),
        ({"groups": 0}, "groups must be a positive number"),
        ({"groups": -1}, "groups must be a positive number"),
        ({"groups": "all"}, "groups must be a positive number"),
        ({"groups": [1, 2]}, "list of lists, one for each group"),
        ({"op": 17}, "op must be one of"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedGradientTape(tf.GradientTape(), **arguments)


def test_what_is_no_tape_and_no_layer():
    with pytest.raises(ValueError, match=r"must be a tf\.GradientTape, not str"):
        hvd.DistributedGradientTape("tape")
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with pytest.raises(ValueError, match="DistributedGradientTape already"):
        hvd.DistributedGradientTape(tape)
    with pytest.raises(ValueError, match="Keras layers, not str"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=["dense"])


def _mismatch(kind: str) -> str:
    shape = [2] if kind == "shape" and hvd.rank() else [3]
    dtype = "float64" if kind == "type" and hvd.rank() else "float32"
    variable = tf.Variable(tf.zeros(shape, dtype))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable)
    with pytest.raises(tf.errors.FailedPreconditionError) as caught:
        hvd.DistributedGradientTape(tape).gradient(loss, [variable])
    assert isinstance(caught.value, HorovodInternalError)
    assert float(hvd.allreduce(2.0)) == 2.0  # the job goes on
    return str(caught.value)


@pytest.mark.parametrize("kind", ["shape", "type"])
def test_gradients_that_differ_between_ranks(tf_pool2: RankPool, kind: str):
    for message in tf_pool2.run(_mismatch, kind):
        assert "DistributedGradientTape" in message


def _not_initialised(rank: int, size: int) -> None:
    x = tf.Variable(1.0)

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            y = x * 2.0
        return hvd.DistributedGradientTape(tape).gradient(y, x)

    with pytest.raises(tf.errors.FailedPreconditionError, match="not initialised"):
        gradient()
    with pytest.raises(tf.errors.FailedPreconditionError, match="not initialised"):
        tf.function(gradient)()
    hvd.init()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(gradient()) == float(tf.function(gradient)()) == 2.0


def test_before_init():
    run_ranks(_not_initialised, 1)


def _traced_before_init(rank: int, size: int) -> list[float]:
    x, table, unused = tf.Variable(1.0), tf.Variable(tf.ones([3, 1])), tf.Variable(1.0)

    @tf.function
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            y = x * (rank + 1.0) + tf.reduce_sum(tf.nn.embedding_lookup(table, [rank]))
        return hvd.DistributedGradientTape(tape).gradient(y, [x, table, unused])

    gradients.get_concrete_function()
    hvd.init()
    scalar, slices, nothing = gradients()
    assert nothing is None
    assert gradients.experimental_get_tracing_count() == 1
    return [float(scalar), *tf.convert_to_tensor(slices).numpy().ravel()]


def test_a_function_may_be_traced_before_init():
    assert run_ranks(_traced_before_init, 1) == [[1.0, 1.0, 0.0, 0.0]]
    assert run_ranks(_traced_before_init, 2) == [[1.5, 0.5, 0.5, 0.0]] * 2
