"""Rows packed side by side: the same values whatever the kinds of columns, copied once only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.spark.common.reading import row_buffer
from horovod.spark.common.reading.columns import ColumnError, Rows
from horovod.spark.common.reading.row_buffer import (
    RowBuffer,
    RowLayout,
    RowQueue,
    RowStorage,
    packed,
)
from tests.effort import examples

KINDS = st.tuples(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]),
    st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
)


def made(kinds: list[Any], rows: int, seed: int = 0) -> Rows:
    random = np.random.default_rng(seed)
    return {
        f"c{n}": random.integers(0, 200, (rows, *shape)).astype(dtype)
        for n, (dtype, shape) in enumerate(kinds)
    }


def assert_same(found: Rows, expected: Rows) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@settings(max_examples=examples(150), deadline=None)
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=12),
    rows=st.integers(0, 40),
    tile=st.integers(1, 50),
    order=st.randoms(use_true_random=False),
)
def test_packed_rows_are_the_same_rows(kinds: Any, rows: int, tile: int, order: Any):
    columns = made(kinds, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_buffer, "_TILE_ROWS", tile)
        patch.setattr(row_buffer, "_TILE_BYTES", tile)
        found = packed(columns)
    assert_same(found, columns)
    layout = RowLayout(found)
    for first, again in zip(layout.pack(found), layout.pack(found), strict=True):
        once = np.shares_memory(first, again) or not first.size or rows < tile
        assert once, "packed once only"
    # what only looks packed: other columns of the same array, in another order, other rows of it
    names = order.sample(list(columns), order.randint(1, len(columns)))
    chosen = {name: found[name] for name in names}
    assert_same(packed(chosen), {name: columns[name] for name in names})
    part = {name: array[rows // 2 :] for name, array in found.items()}
    assert_same(packed(part), {name: array[rows // 2 :] for name, array in columns.items()})
    backwards = {name: array[::-1] for name, array in found.items()}
    assert_same(packed(backwards), {name: array[::-1] for name, array in columns.items()})
    order.shuffle(names)
    swapped = {name: found[other] for name, other in zip(sorted(names), names, strict=True)}
    expected = {name: columns[other] for name, other in zip(sorted(names), names, strict=True)}
    assert_same(packed(swapped), expected)


def test_columns_of_one_kind_become_one_array():
    rows = packed(made([(np.float32, ())] * 100, 3000))
    (array,) = RowLayout(rows).pack(rows)
    assert array.shape == (3000, 100)
    assert all(column.base is array for column in rows.values())


@pytest.mark.parametrize("already", [False, True])
def test_rows_that_wait_are_copies(already: bool):
    """A reader of somebody else may use its arrays again for the next chunk."""
    count = 2000 if already else 10
    rows = made([(np.int64, ()), (np.int64, ()), (np.float32, (2,))], count)
    expected = {name: array.copy() for name, array in rows.items()}
    rows = packed(rows) if already else rows
    layout = RowLayout(rows)
    ordered, shuffled = RowQueue(layout), RowBuffer(RowStorage(layout, count // 2))
    ordered.add(rows)
    shuffled.add(rows)
    for array in rows.values():
        array[...] = 0
    random = np.random.default_rng(0)
    assert_same(layout.columns(ordered.draw(count, random)), expected)
    found = layout.columns(shuffled.draw(count, random))
    for name, array in expected.items():
        np.testing.assert_array_equal(np.sort(found[name], 0), np.sort(array, 0))


def test_what_pyarrow_decoded_is_not_copied():
    decoded = pa.array(np.arange(20.0)).to_numpy()
    assert not decoded.flags.writeable
    rows: Rows = {"x": decoded.reshape(10, 2)}
    queue = RowQueue(RowLayout(rows))
    queue.add(rows)
    (found,) = queue.draw(10, np.random.default_rng(0))
    assert np.shares_memory(found, decoded)
    assert found.flags.writeable, "torch warns of tensors that must not be written to"
    del decoded, rows, queue
    assert found.sum() == 190, "the memory lives as long as the rows"


def test_two_buffers_share_a_storage():
    """Rows of the next pass come in as those of this one go out; none is lost or doubled."""
    rows = made([(np.int64, ()), (np.float32, (2,))], 60)
    rows["c0"] = np.arange(60)
    layout = RowLayout(rows)
    storage = RowStorage(layout, 40)
    first, second = RowBuffer(storage), RowBuffer(storage)
    random = np.random.default_rng(0)
    first.add({name: array[:40] for name, array in rows.items()})
    seen: list[int] = []
    for start in range(40, 60, 5):
        seen += layout.columns(first.draw(10, random))["c0"].tolist()
        second.add({name: array[start : start + 5] for name, array in rows.items()})
    assert sorted(seen) == list(range(40))
    assert first.size == 0
    found = layout.columns(second.draw(20, random))
    assert sorted(found["c0"].tolist()) == list(range(40, 60))
    order = found["c0"]
    np.testing.assert_array_equal(found["c1"], rows["c1"][order])


def test_chunks_that_differ_are_an_error():
    layout = RowLayout(made([(np.int64, ())] * 2, 5))
    with pytest.raises(ColumnError, match=r"column 'c1' has rows of shape \(\) and int64"):
        layout.pack(packed(made([(np.int64, ()), (np.int64, (2,))], 5)))
    with pytest.raises(ColumnError, match="column 'c1' is missing"):
        layout.pack(packed(made([(np.int64, ())], 5)))
