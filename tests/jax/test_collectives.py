"""Every collective on arrays and on trees, at once and in a compiled program, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import horovod.jax as hvd
from tests.ranks import RankPool

MODES = ["eager", "jit"]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
MOVED = [*FLOATS, *INTEGERS, "uint16", "uint32", "uint64", "bool"]


def compiled(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function) if mode == "jit" else function


def of_rank(dtype: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
    random = np.random.default_rng([rank, len(shape)])
    return np.asarray(jnp.asarray(random.integers(0, 2 if dtype == "bool" else 9, shape), dtype))


def check(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    kind = np.complex128 if np.iscomplexobj(found) else np.float64
    np.testing.assert_allclose(found.astype(kind), expected.astype(kind), rtol=1e-2)


# -- allreduce -------------------------------------------------------------------------------


def _reduce_every_type(mode: str) -> None:
    with jax.enable_x64(True):
        operators = {hvd.Sum: sum, hvd.Min: None, hvd.Max: None, hvd.Average: None}
        for dtype in [*FLOATS, *INTEGERS]:
            for shape in [(), (3,), (2, 0), (5, 4)]:
                everybody = [of_rank(dtype, shape, rank) for rank in range(hvd.size())]
                mine = jnp.asarray(everybody[hvd.rank()])
                for op in operators:
                    if dtype == "complex64" and op in (hvd.Min, hvd.Max):
                        continue
                    reduced = compiled(mode, lambda x, op=op: hvd.allreduce(x, op=op))(mine)
                    assert isinstance(reduced, jax.Array)
                    assert reduced.dtype == mine.dtype
                    total = np.sum([each.astype(complex) for each in everybody], axis=0)
                    if op is hvd.Average:
                        total = total / hvd.size()
                        expected = total if dtype in FLOATS else np.trunc(total.real)
                    elif op is hvd.Sum:
                        expected = total
                    else:
                        picked = np.min if op is hvd.Min else np.max
                        expected = picked([each.astype(float) for each in everybody], axis=0)
                    check(reduced, expected if dtype == "complex64" else np.real(expected))


@pytest.mark.parametrize("mode", MODES)
def test_allreduce_of_every_type(jax_pool2: RankPool, mode: str):
    jax_pool2.run(_reduce_every_type, mode)


def _scale(mode: str) -> list[float]:
    def step(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)

    floats = compiled(mode, step)(jnp.float32([2.0]))
    integers = compiled(mode, step)(jnp.int32([3]))  # 1 on each rank, scaled before it is added
    return [floats.item(), integers.item()]


@pytest.mark.parametrize("mode", MODES)
def test_scale_factors(jax_pool2: RankPool, mode: str):
    assert jax_pool2.run(_scale, mode) == [[6.0, 6]] * 2


def _tree(rank: int) -> dict[str, Any]:
    return {
        "layer": {"kernel": jnp.full((2, 3), rank + 1.0), "bias": jnp.arange(3.0) * rank},
        "steps": (jnp.int32(rank), None, jnp.bfloat16(rank)),
    }


def _reduce_tree(mode: str) -> list[Any]:
    tree = _tree(hvd.rank())
    before = jax.tree.map(np.array, tree)
    step = compiled(mode, lambda tree: hvd.allreduce(tree, op=hvd.Sum))
    for _ in range(3):
        reduced = step(tree)
        jax.tree.map(check, reduced, jax.tree.map(lambda a, b: a + b, _tree(0), _tree(1)))
        assert jax.tree.structure(reduced) == jax.tree.structure(tree)
        assert jax.tree.map(jnp.dtype, reduced) == jax.tree.map(jnp.dtype, tree)
        jax.tree.map(np.testing.assert_array_equal, tree, before)  # is left alone
    return [hvd.allreduce({}), compiled(mode, lambda: hvd.allreduce([None]))()]


@pytest.mark.parametrize("mode", MODES)
def test_allreduce_of_a_tree(jax_pool2: RankPool, mode: str):
    assert jax_pool2.run(_reduce_tree, mode) == [[{}, [None]]] * 2


def _one_operation(folder: str) -> tuple[int, int]:
    """How often the engine reduces for a tree of thirty leaves."""
    import json
    from pathlib import Path

    path = f"{folder}/timeline.json"
    tree = {f"leaf{index:03}": jnp.ones(index + 1) for index in range(30)}
    hvd.shutdown()
    import os

    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    hvd.init()
    try:
        counts = []
        for mode, step in [("eager", hvd.allreduce), ("jit", jax.jit(hvd.allreduce))]:
            hvd.start_timeline(f"{path}.{mode}")
            jax.block_until_ready(step(tree))
            hvd.stop_timeline()
            files = [p for p in Path(folder).iterdir() if mode in p.name]
            content = [event for p in files for event in json.loads(p.read_text())]
            names = [event.get("name", "") for event in content if event.get("ph") == "B"]
            reductions = [name for name in names if name.endswith("_ALLREDUCE")]
            counts.append(len([name for name in reductions if "NEGOTIATE" not in name]))
    finally:
        del os.environ["HOROVOD_TIMELINE"]
        hvd.shutdown()
        hvd.init()
    return counts[0], counts[1]


def test_a_tree_is_one_operation(jax_pool2: RankPool, tmp_path: Any):
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder in folders:
        folder.mkdir()

    def run(paths: list[str]) -> tuple[int, int]:
        return _one_operation(paths[hvd.rank()])

    assert jax_pool2.run(run, [str(folder) for folder in folders]) == [(1, 1)] * 2


def _operators() -> list[Any]:
    mine = jnp.float32([hvd.rank() + 2])
    product = hvd.allreduce(mine, op=hvd.Product)
    adasum = hvd.allreduce(mine, op=hvd.Adasum)
    with pytest.warns(DeprecationWarning, match="average"):
        legacy = hvd.allreduce(mine, average=False)
    truth = hvd.allreduce(jnp.asarray([hvd.rank() == 1]), op=hvd.Max)
    same = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Adasum))(mine)
    assert same.item() == adasum.item()
    return [product.item(), legacy.item(), truth.item()]


def test_other_operators(jax_pool2: RankPool):
    assert jax_pool2.run(_operators) == [[6.0, 5.0, True]] * 2


def _groups(mode: str) -> list[Any]:
    rank = hvd.rank()
    pair = [jnp.float32([rank]), jnp.int32([2 * rank])]

    def step(pair: list[Any]) -> Any:
        return (
            hvd.grouped_allreduce(pair, op=hvd.Sum),
            hvd.grouped_allgather(pair),
            hvd.grouped_reducescatter([jnp.concatenate([x, x]) for x in pair], op=hvd.Sum),
        )

    reduced, gathered, scattered = compiled(mode, step)(pair)
    assert isinstance(reduced, list)
    assert isinstance(gathered, tuple)
    return jax.tree.map(lambda x: x.tolist(), [reduced, list(gathered), scattered])


@pytest.mark.parametrize("mode", MODES)
def test_grouped_operations(jax_pool2: RankPool, mode: str):
    expected = [[[1.0], [2]], [[0.0, 1.0], [0, 2]], [[1.0], [2]]]
    assert jax_pool2.run(_groups, mode) == [expected] * 2


# -- moving ----------------------------------------------------------------------------------


def _move_every_type(mode: str) -> None:
    with jax.enable_x64(True):
        size, rank = hvd.size(), hvd.rank()
        for dtype in MOVED:
            everybody = [of_rank(dtype, (4, 3), each) for each in range(size)]
            mine = jnp.asarray(everybody[rank])

            def step(x: Any) -> list[Any]:
                return [hvd.allgather(x), hvd.broadcast(x, 1), hvd.alltoall(x)]

            gathered, sent, exchanged = compiled(mode, step)(mine)
            assert gathered.dtype == sent.dtype == exchanged.dtype == mine.dtype
            rows = 4 // size
            parts = [each[rank * rows : (rank + 1) * rows] for each in everybody]
            np.testing.assert_array_equal(gathered, np.concatenate(everybody))
            np.testing.assert_array_equal(sent, everybody[1])
            np.testing.assert_array_equal(exchanged, np.concatenate(parts))


@pytest.mark.parametrize("mode", MODES)
def test_moving_every_type(jax_pool2: RankPool, mode: str):
    jax_pool2.run(_move_every_type, mode)


def _move_trees(mode: str) -> None:
    rank, size = hvd.rank(), hvd.size()

    def tree(rank: int) -> dict[str, Any]:
        return {
            "a": jnp.arange(4.0) + rank,
            "b": [jnp.full((4, 2), rank, jnp.int8), jnp.zeros((4, 0)), jnp.bool_([rank] * 4)],
        }

    def step(own: Any) -> list[Any]:
        return [hvd.broadcast(own, 1), hvd.allgather(own), hvd.alltoall(own)]

    sent, gathered, exchanged = compiled(mode, step)(tree(rank))
    jax.tree.map(np.testing.assert_array_equal, sent, tree(1))
    everything = jax.tree.map(lambda *leaves: np.concatenate(leaves), *map(tree, range(size)))
    jax.tree.map(np.testing.assert_array_equal, gathered, everything)
    parts = [jax.tree.map(lambda x: x[2 * rank : 2 * rank + 2], tree(r)) for r in range(size)]
    expected = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    jax.tree.map(np.testing.assert_array_equal, exchanged, expected)


@pytest.mark.parametrize("mode", MODES)
def test_moving_trees(jax_pool2: RankPool, mode: str):
    jax_pool2.run(_move_trees, mode)


def _uneven() -> list[Any]:
    rank = hvd.rank()
    rows = hvd.allgather(jnp.full((rank + 1, 2), rank, jnp.int32))
    none = hvd.allgather(jnp.zeros((2 * rank, 1)))
    sent, received = hvd.alltoall(jnp.arange(3.0) + 10 * rank, splits=np.array([1, 2]))
    nothing, counts = hvd.alltoall(jnp.zeros((0, 2)), splits=jnp.zeros(2, jnp.int32))
    scattered = hvd.reducescatter(jnp.arange(3.0), op=hvd.Sum)
    compiled_rows = jax.jit(lambda x: hvd.reducescatter(x, op=hvd.Sum))(jnp.arange(3.0))
    np.testing.assert_array_equal(scattered, compiled_rows)
    return [
        rows[:, 0].tolist(),
        none.shape,
        sent.tolist(),
        received.tolist(),
        (nothing.shape, counts.tolist()),
        scattered.tolist(),
    ]


def test_uneven_rows(jax_pool2: RankPool):
    common = [[0, 1, 1], (2, 1)]
    empty = ((0, 2), [0, 0])
    assert jax_pool2.run(_uneven) == [
        [*common, [0.0, 10.0], [1, 1], empty, [0.0, 2.0]],
        [*common, [1.0, 2.0, 11.0, 12.0], [2, 2], empty, [4.0]],
    ]


# -- asynchronously ----------------------------------------------------------------------------


def _asynchronous() -> list[Any]:
    rank = hvd.rank()
    mine = jnp.float32([rank, 1])
    handles = [
        hvd.allreduce_async({"x": mine}, name="sum", op=hvd.Sum),
        hvd.grouped_allreduce_async([mine, mine], op=hvd.Max),
        hvd.allgather_async(mine),
        hvd.grouped_allgather_async([mine]),
        hvd.broadcast_async(mine, 1),
        hvd.alltoall_async(mine),
        hvd.reducescatter_async(mine, op=hvd.Sum),
        hvd.grouped_reducescatter_async([mine], op=hvd.Sum),
    ]
    results = [hvd.synchronize(handle) for handle in reversed(handles)]
    with pytest.raises(ValueError, match="does not exist"):
        hvd.poll(handles[0])
    return jax.tree.map(lambda x: x.tolist(), results[::-1])


def test_asynchronous_forms(jax_pool2: RankPool):
    for rank, found in enumerate(jax_pool2.run(_asynchronous)):
        assert found == [
            {"x": [1.0, 2.0]},
            [[1.0, 1.0], [1.0, 1.0]],
            [0.0, 1.0, 1.0, 1.0],
            [[0.0, 1.0, 1.0, 1.0]],
            [1.0, 1.0],
            ([[0.0, 1.0], [1.0, 1.0]][rank], [1, 1]),
            [[1.0], [2.0]][rank],
            [[[1.0], [2.0]][rank]],
        ]


# -- programs ----------------------------------------------------------------------------------


def _in_order() -> list[float]:
    """Independent calls of many programs, which JAX starts without waiting for the one before."""

    @jax.jit
    def first(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x.sum(), op=hvd.Sum)

    @jax.jit
    def second(x: Any) -> Any:
        return hvd.allreduce({"other": x * 2, "same": x}, op=hvd.Sum)

    x = jnp.ones(3)
    results = []
    for number in range(20):
        results.append(first(x * number)[1])
        results.append(second(x)["other"][0])
        if number % 5 == 0:
            results.append(hvd.allreduce(jnp.float32(number)))  # waits for the programs
    return [result.item() for result in results]


def test_programs_run_in_order(jax_pool2: RankPool):
    expected = []
    for number in range(20):
        expected += [6.0 * number, 4.0]
        if number % 5 == 0:
            expected.append(float(number))
    assert jax_pool2.run(_in_order) == [expected] * 2


def _control_flow() -> list[Any]:
    rank = hvd.rank()

    def add(carry: Any, x: Any) -> Any:
        return hvd.allreduce(carry + x, op=hvd.Sum), None

    scanned, _ = jax.jit(lambda x: jax.lax.scan(add, x, jnp.arange(3.0)))(jnp.float32(rank))
    looped = jax.jit(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: hvd.allreduce(y, op=hvd.Sum), x)
    )(jnp.float32(1))
    chosen = jax.jit(
        lambda x: jax.lax.cond(x > 0, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: x)
    )(jnp.float32(rank + 1))
    inner = jax.jit(lambda x: jax.jit(lambda y: hvd.allreduce(y + 1))(x) * 2)(jnp.float32(rank))
    batched = jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.arange(3.0))
    both = jax.jit(jax.vmap(lambda x: hvd.broadcast(x, 1)))(jnp.arange(2.0) + rank)
    return [
        scanned.item(),
        looped.item(),
        chosen.item(),
        inner.item(),
        batched.tolist(),
        both.tolist(),
    ]


def test_control_flow(jax_pool2: RankPool):
    # ((0 + 1) * 2 + 1 ... ): each pass adds its number twice to twice what there was.
    expected = [2 * (2 * 1 + 2) + 4, 8.0, 3.0, 3.0, [0.0, 2.0, 4.0], [1.0, 2.0]]
    assert jax_pool2.run(_control_flow) == [expected] * 2


def _donated() -> bool:
    @jax.jit
    def plain(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum), x + 1  # x is needed afterwards

    reduced, more = plain(jnp.full(1000, hvd.rank() + 1.0))
    step = jax.jit(lambda x: hvd.allreduce(x), donate_argnums=0)
    x = jnp.full(1000, float(hvd.rank()))
    for _ in range(3):
        x = step(x)
    return bool((reduced == 3).all() and (more == hvd.rank() + 2).all() and (x == 0.5).all())


def test_arguments_stay_what_they_were(jax_pool2: RankPool):
    assert jax_pool2.run(_donated) == [True, True]


def _no_copy() -> list[bool]:
    """Where the memory of arguments and results is."""
    from horovod.jax.arrays import to_jax, to_torch

    array = jnp.arange(10.0)
    tensor = to_torch(array)
    back = to_jax(tensor.clone(), array)
    again = to_torch(back)
    kept = to_jax(again, back)
    return [
        tensor.data_ptr() == array.unsafe_buffer_pointer(),
        again.data_ptr() == back.unsafe_buffer_pointer(),
        kept.unsafe_buffer_pointer() == back.unsafe_buffer_pointer(),
    ]


def test_host_memory_is_not_copied(jax_pool2: RankPool):
    assert jax_pool2.run(_no_copy) == [[True] * 3] * 2


def _compression() -> list[Any]:
    values = {"w": jnp.float32([1 + 2**-12, 3]), "n": jnp.int32([1])}
    results = []
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        step = jax.jit(lambda tree, c=compression: hvd.allreduce(tree, compression=c))
        eager, traced = hvd.allreduce(values, compression=compression), step(values)
        jax.tree.map(np.testing.assert_array_equal, eager, traced)
        assert eager["w"].dtype == jnp.float32
        results.append(eager["w"].tolist())
    scattered = hvd.reducescatter(values["w"], compression=hvd.Compression.fp16)
    return [*results, scattered.dtype.name]


def test_compression(jax_pool2: RankPool):
    exact, half, brain, kind = jax_pool2.run(_compression)[0]
    assert exact == [1 + 2**-12, 3]
    assert half == brain == [1.0, 3]
    assert kind == "float32"


# -- process sets and join ---------------------------------------------------------------------


def _process_sets(mode: str) -> list[Any]:
    rank = hvd.rank()
    pairs = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2])]
    try:
        found = []
        for pair in pairs:
            if not pair.included():
                with pytest.raises(ValueError, match="does not belong to process set"):
                    hvd.allreduce(jnp.float32(1), process_set=pair)
                continue

            def step(x: Any, pair: Any = pair) -> Any:
                return [
                    hvd.allreduce({"x": x}, op=hvd.Sum, process_set=pair)["x"],
                    hvd.allgather(x[None], process_set=pair),
                    hvd.broadcast(x, pair.ranks[1], process_set=pair),
                    jax.grad(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=pair))(x),
                ]

            made = compiled(mode, step)(jnp.float32(rank))
            found.append([each.tolist() for each in made])
        return found
    finally:
        for pair in pairs:
            hvd.remove_process_set(pair)


@pytest.mark.parametrize("mode", MODES)
def test_process_sets(jax_pool3: RankPool, mode: str):
    lower, upper = [1.0, [0.0, 1.0], 1.0, 2.0], [3.0, [1.0, 2.0], 2.0, 2.0]
    assert jax_pool3.run(_process_sets, mode) == [[lower], [lower, upper], [upper]]


def _join() -> list[Any]:
    """A rank that has joined takes part in the programs of the others."""
    step = jax.jit(lambda tree: hvd.allreduce(tree, op=hvd.Sum))
    totals = [step({"x": jnp.ones(2), "n": jnp.int32(1)}) for _ in range(1 + 2 * hvd.rank())]
    last = hvd.join()
    return [last, [each["x"][0].item() for each in totals], int(step({"n": jnp.int32(1)})["n"])]


def test_join(jax_pool2: RankPool):
    assert jax_pool2.run(_join) == [[1, [2.0], 2], [1, [2.0, 1.0, 1.0], 2]]


def _metrics() -> list[Any]:
    rank = hvd.rank()
    at_once = hvd.average_metrics({"loss": 1.0 + rank, "correct": rank, "rows": np.arange(2)})
    traced = jax.jit(hvd.average_metrics)({"n": jnp.int32(rank)})
    assert isinstance(at_once["loss"], float)
    return [at_once["loss"], at_once["correct"], at_once["rows"].tolist(), traced["n"].item()]


def test_averages_of_metrics(jax_pool2: RankPool):
    assert jax_pool2.run(_metrics) == [[1.5, 0.5, [0.0, 1.0], 0.5]] * 2
