"""Every collective, type, shape and way to run it against a single-process reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.tensorflow as hvd
from horovod.common.reduce_op import ReduceOp
from horovod.tensorflow.ops import bridge
from tests.effort import examples
from tests.ranks import RankPool
from tests.tensorflow.modes import MODES, run_in
from tests.torch.reference import Case, cases

# What upstream moves, and what torch knows beyond.
MOVED = [
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
]

modes = st.sampled_from(MODES)


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    return bridge.to_tensorflow(tensor.clone()).numpy()


def _same_bits(arrays: Sequence[np.ndarray]) -> bool:
    return len({(str(a.dtype), a.shape, a.tobytes()) for a in arrays}) == 1


# -- allreduce -------------------------------------------------------------------------------


def _reduce(mode: str, chosen: list[Case]) -> list[np.ndarray]:
    def step(*tensors):
        return [
            hvd.allreduce(
                tensor,
                op=case.op,
                prescale_factor=case.prescale,
                postscale_factor=case.postscale,
                name=f"case {number}",
            )
            for number, (tensor, case) in enumerate(zip(tensors, chosen, strict=True))
        ]

    return run_in(mode, step, [_as_array(case.tensor(hvd.rank())) for case in chosen])


def _reduce_together(mode: str, chosen: list[Case]) -> list[np.ndarray]:
    def step(*tensors):
        return hvd.grouped_allreduce(
            tensors,
            op=chosen[0].op,
            prescale_factor=chosen[0].prescale,
            postscale_factor=chosen[0].postscale,
        )

    return run_in(mode, step, [_as_array(case.tensor(hvd.rank())) for case in chosen])


def _check(chosen: list[Case], by_rank: list[list[np.ndarray]]) -> None:
    for case, results in zip(chosen, zip(*by_rank, strict=True), strict=True):
        assert _same_bits(results)
        expected = _as_array(case.expected(len(results)))
        assert results[0].dtype == expected.dtype
        assert results[0].shape == expected.shape
        case.check(bridge.to_torch(tf.constant(results[0])).cpu(), len(results))


@given(mode=modes, chosen=st.lists(cases(), min_size=5, max_size=12))
@settings(max_examples=examples(18), deadline=None)
def test_allreduce(tf_pool3: RankPool, mode: str, chosen: list[Case]):
    _check(chosen, tf_pool3.run(_reduce, mode, chosen))


@given(mode=modes, data=st.data(), first=cases())
@settings(max_examples=examples(15), deadline=None)
def test_a_group_of_tensors_of_any_types(
    tf_pool3: RankPool, mode: str, data: st.DataObject, first: Case
):
    chosen = [first, *data.draw(st.lists(cases((first.op,)), max_size=6))]
    scaled = all(case.dtype is not torch.bool for case in chosen)
    factors = (first.prescale, first.postscale) if scaled else (1.0, 1.0)
    group = [Case(c.dtype, c.shape, c.layout, c.op, *factors, c.seed) for c in chosen]
    _check(group, tf_pool3.run(_reduce_together, mode, group))


@pytest.mark.parametrize("mode", MODES)
def test_adasum_of_equal_tensors_is_that_tensor(tf_pool2: RankPool, mode: str):
    def adasum(mode: str) -> np.ndarray:
        (result,) = run_in(
            mode, lambda x: [hvd.allreduce(x, op=hvd.Adasum)], [np.float32([1, 2, 3])]
        )
        return result

    for result in tf_pool2.run(adasum, mode):
        np.testing.assert_allclose(result, [1, 2, 3], rtol=1e-6)


def test_an_empty_group_is_returned(tf_pool2: RankPool):
    def empty() -> list[object]:
        return [
            hvd.grouped_allreduce([]),
            hvd.grouped_allgather([]),
            hvd.grouped_reducescatter([]),
        ]

    assert tf_pool2.run(empty) == [[[], [], []]] * 2


def test_python_numbers_and_lists(tf_pool2: RankPool):
    def numbers() -> list[object]:
        return [
            hvd.allreduce(float(hvd.rank())).numpy(),
            hvd.allreduce([1, 2 + hvd.rank()], op=hvd.Sum).numpy().tolist(),
            hvd.allgather([[hvd.rank()]]).numpy().tolist(),
            hvd.broadcast(hvd.rank() + 5, 1).numpy(),
        ]

    assert tf_pool2.run(numbers) == [[0.5, [2, 5], [[0], [1]], 6]] * 2


def test_the_older_average_flag(tf_pool2: RankPool):
    def reduce() -> list[float]:
        with pytest.warns(DeprecationWarning, match="average"):
            total = hvd.allreduce(3.0, average=False)
        with pytest.warns(DeprecationWarning, match="average"):
            (mean,) = hvd.grouped_allreduce([3.0], average=True)
        return [float(total), float(mean)]

    assert tf_pool2.run(reduce) == [[6.0, 3.0]] * 2


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_compression(tf_pool2: RankPool, mode: str, compression: str):
    def reduce(mode: str, compression: str) -> list[np.ndarray]:
        chosen = getattr(hvd.Compression, compression)

        def step(x, y, i):
            return [
                hvd.allreduce(x, op=hvd.Sum, compression=chosen),
                *hvd.grouped_allreduce([x, i, y], op=hvd.Sum, compression=chosen),
                hvd.reducescatter(x, op=hvd.Sum, compression=chosen),
                *hvd.grouped_reducescatter([i, x], op=hvd.Sum, compression=chosen),
            ]

        return run_in(mode, step, [np.float32([1.5, 2]), np.float64([0.25]), np.int32([70000, 2])])

    for rank, results in enumerate(tf_pool2.run(reduce, mode, compression)):
        mine = slice(rank, rank + 1)
        expected = [
            np.float32([3, 4]),
            *(np.float32([3, 4]), np.int32([140000, 4]), np.float64([0.5])),
            np.float32([3, 4])[mine],
            *(np.int32([140000, 4])[mine], np.float32([3, 4])[mine]),
        ]
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype == wanted.dtype
            np.testing.assert_array_equal(result, wanted)


# -- IndexedSlices ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_slices_of_all_ranks_come_together(tf_pool3: RankPool, mode: str, op: ReduceOp):
    def reduce(mode: str, op: ReduceOp) -> list[np.ndarray]:
        rank = hvd.rank()

        def step(values, indices):
            slices = tf.IndexedSlices(values, indices, dense_shape=tf.constant([4, 2]))
            reduced = hvd.allreduce(slices, op=op)
            first, dense, second = hvd.grouped_allreduce([slices, tf.ones(2), slices], op=op)
            every = [tf.convert_to_tensor(each) for each in (reduced, first, second)]
            return [dense, reduced.values, reduced.indices, *every]

        # Rank 0 has no slices at all, rank 2 has one twice.
        values = np.float32([[1, 2]] * rank)
        return run_in(mode, step, [values.reshape(-1, 2), np.int64([3] * rank)])

    for dense, values, indices, *every in tf_pool3.run(reduce, mode, op):
        share = 3 if op is hvd.Average else 1
        assert dense.tolist() == [3 / share] * 2
        np.testing.assert_allclose(values, np.float32([[1, 2]] * 3) / share, rtol=1e-6)
        assert indices.tolist() == [3, 3, 3]
        for result in every:
            np.testing.assert_allclose(result, np.float32([[0, 0]] * 3 + [[3, 6]]) / share)


def test_the_other_operators_are_not_defined_for_slices(tf_pool2: RankPool):
    def refuse() -> float:
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
        for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
            with pytest.raises(NotImplementedError, match="IndexedSlices"):
                hvd.allreduce(slices, op=op)
            with pytest.raises(NotImplementedError, match="IndexedSlices"):
                hvd.grouped_allreduce([slices], op=op)
        for factor in ({"prescale_factor": 2.0}, {"postscale_factor": 2.0}):
            with pytest.raises(NotImplementedError, match="factor"):
                hvd.allreduce(slices, op=hvd.Sum, **factor)
        return float(hvd.allreduce(1.0, op=hvd.Sum))

    assert tf_pool2.run(refuse) == [2.0, 2.0]


# -- moving ----------------------------------------------------------------------------------


def _array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits that the type has: they must arrive as they are."""
    generator = np.random.default_rng(seed)
    numpy_type = np.dtype(tf.dtypes.as_dtype(dtype).as_numpy_dtype)
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape)) * numpy_type.itemsize
    return np.frombuffer(generator.bytes(count), numpy_type).reshape(shape)


moves = st.tuples(
    st.sampled_from(MOVED),
    st.lists(st.integers(0, 5), min_size=3, max_size=3),  # rows of each rank
    st.lists(st.integers(0, 3), max_size=2).map(tuple),  # the other dimensions
    st.integers(0, 1000),
)
Move = tuple[str, list[int], tuple[int, ...], int]


def _own(move: Move, rank: int) -> np.ndarray:
    dtype, rows, row_shape, seed = move
    return _array(dtype, (rows[rank], *row_shape), 10 * seed + rank)


def _gather(mode: str, chosen: list[Move]) -> list[np.ndarray]:
    def step(*tensors):
        return [
            *[hvd.allgather(tensor, name=f"move {i}") for i, tensor in enumerate(tensors)],
            *hvd.grouped_allgather(tensors, name="together"),
        ]

    return run_in(mode, step, [_own(move, hvd.rank()) for move in chosen])


@given(mode=modes, chosen=st.lists(moves, min_size=3, max_size=8))
@settings(max_examples=examples(15), deadline=None)
def test_allgather(tf_pool3: RankPool, mode: str, chosen: list[Move]):
    expected = [np.concatenate([_own(move, rank) for rank in range(3)]) for move in chosen]
    for results in tf_pool3.run(_gather, mode, chosen):
        for result, wanted in zip(results, expected * 2, strict=True):
            assert _same_bits([result, wanted])


def _broadcast(mode: str, chosen: list[tuple[str, tuple[int, ...], int, int]]) -> list[np.ndarray]:
    def step(*tensors):
        return [
            hvd.broadcast(tensor, root, name=f"from {i}")
            for i, (tensor, (_, _, _, root)) in enumerate(zip(tensors, chosen, strict=True))
        ]

    rank = hvd.rank()
    arrays = [_array(dtype, shape, 10 * seed + rank) for dtype, shape, seed, _ in chosen]
    return run_in(mode, step, arrays)


@given(
    mode=modes,
    chosen=st.lists(
        st.tuples(
            st.sampled_from(MOVED),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
            st.integers(0, 1000),
            st.integers(0, 2),
        ),
        min_size=5,
        max_size=10,
    ),
)
@settings(max_examples=examples(15), deadline=None)
def test_broadcast(
    tf_pool3: RankPool, mode: str, chosen: list[tuple[str, tuple[int, ...], int, int]]
):
    expected = [_array(dtype, shape, 10 * seed + root) for dtype, shape, seed, root in chosen]
    for results in tf_pool3.run(_broadcast, mode, chosen):
        for result, wanted in zip(results, expected, strict=True):
            assert _same_bits([result, wanted])


def _alltoall(mode: str, move: Move, splits: list[list[int]]) -> list[np.ndarray]:
    rank = hvd.rank()
    even = np.repeat(_own(move, rank)[:1], 6, axis=0)
    rows = np.int32(splits[rank])

    def step(tensor, rows, even):
        given, received = hvd.alltoall(tensor, rows)
        listed, again = hvd.alltoall(tensor, splits[rank])
        counted, once_more = hvd.alltoall(tensor, np.int64(splits[rank]))
        return [given, received, listed, again, counted, once_more, hvd.alltoall(even)]

    return run_in(mode, step, [_own(move, rank), rows, even])


@given(mode=modes, move=moves, data=st.data())
@settings(max_examples=examples(20), deadline=None)
def test_alltoall(tf_pool3: RankPool, mode: str, move: Move, data: st.DataObject):
    splits = []
    for rank in range(3):  # what is left over is not sent
        first = data.draw(st.integers(0, move[1][rank]))
        second = data.draw(st.integers(0, move[1][rank] - first))
        splits.append([first, second, data.draw(st.integers(0, move[1][rank] - first - second))])
    parts = [
        np.split(_own(move, rank)[: sum(splits[rank])], np.cumsum(splits[rank])[:2])
        for rank in range(3)
    ]
    ones = [_own(move, rank)[:1] for rank in range(3)]
    # All ranks have six equal rows, or none has any.
    if len({len(one) for one in ones}) > 1:
        return
    for rank, results in enumerate(tf_pool3.run(_alltoall, mode, move, splits)):
        wanted = np.concatenate([parts[other][rank] for other in range(3)])
        received = np.int32([splits[other][rank] for other in range(3)])
        halves = np.concatenate([np.repeat(one, 2, axis=0) for one in ones])
        expected = [*[wanted, received] * 3, halves]
        for result, right in zip(results, expected, strict=True):
            assert _same_bits([result, right])


# -- reducescatter ---------------------------------------------------------------------------

scattered = cases((ReduceOp.SUM, ReduceOp.AVERAGE)).filter(
    lambda case: case.shape != () and case.dtype is not torch.bool
)


def _scatter(mode: str, chosen: list[Case]) -> list[np.ndarray]:
    def step(*tensors):
        singles = [
            hvd.reducescatter(
                tensor,
                op=case.op,
                prescale_factor=case.prescale,
                postscale_factor=case.postscale,
                name=f"case {number}",
            )
            for number, (tensor, case) in enumerate(zip(tensors, chosen, strict=True))
        ]
        return [*singles, *hvd.grouped_reducescatter(tensors, op=hvd.Sum)]

    return run_in(mode, step, [_as_array(case.tensor(hvd.rank())) for case in chosen])


def _share(whole: torch.Tensor, rank: int) -> torch.Tensor:
    """The first ranks get one row more where they do not divide."""
    each, extra = divmod(whole.shape[0], 3)
    first = rank * each + min(rank, extra)
    return whole[first : first + each + (rank < extra)]


@given(mode=modes, chosen=st.lists(scattered, min_size=2, max_size=6))
@settings(max_examples=examples(15), deadline=None)
def test_reducescatter(tf_pool3: RankPool, mode: str, chosen: list[Case]):
    plain = [Case(c.dtype, c.shape, c.layout, ReduceOp.SUM, seed=c.seed) for c in chosen]
    for rank, results in enumerate(tf_pool3.run(_scatter, mode, chosen)):
        for result, case in zip(results, [*chosen, *plain], strict=True):
            mine = bridge.to_torch(tf.constant(result)).cpu()
            torch.testing.assert_close(mine, _share(case.expected(3), rank))
