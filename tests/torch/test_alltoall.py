"""alltoall with equal and with uneven splits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.torch as hvd
from tests.effort import examples
from tests.ranks import RankPool
from tests.torch.reference import Case, every_dtype, layouts, row_shapes


def _exchange(
    by_rank: list[Case], splits: list[list[int]], form: str, name: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rank = hvd.rank()
    tensor = by_rank[rank].tensor(rank)
    mine: Any = splits[rank]
    if "tensor" in form:
        mine = torch.tensor(mine, dtype=torch.int32)
    elif "array" in form:
        mine = np.array(mine)  # int64
    if "async" in form:
        return hvd.synchronize(hvd.alltoall_async(tensor, mine, name))
    return hvd.alltoall(tensor, mine, name)


@given(
    splits=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=3, max_size=3),
    unsent=st.integers(0, 2),
    shape=row_shapes,
    dtype=every_dtype,
    layout=layouts,
    form=st.sampled_from(["list", "tensor", "array", "async list", "async tensor"]),
    name=st.none() | st.text(),
)
@settings(max_examples=examples(150), deadline=None)
def test_uneven_splits(pool3: RankPool, splits, unsent, shape, dtype, layout, form, name):
    by_rank = [Case(dtype, (sum(rows) + unsent, *shape), layout, seed=5) for rows in splits]
    sent = [case.tensor(rank).split([*splits[rank], unsent]) for rank, case in enumerate(by_rank)]
    for rank, (output, received) in enumerate(pool3.run(_exchange, by_rank, splits, form, name)):
        expected = torch.cat([parts[rank] for parts in sent])
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        assert received.dtype is torch.int32
        assert received.tolist() == [rows[rank] for rows in splits]


def _equal_parts(rows: int) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    tensor = torch.arange(rows * 2).view(rows, 2) + 100 * hvd.rank()
    plain = hvd.alltoall(tensor)
    assert isinstance(plain, torch.Tensor)
    _, received = hvd.synchronize(hvd.alltoall_async(tensor))
    paired, from_empty = hvd.alltoall(tensor, [])
    return plain, paired, received.tolist(), from_empty.tolist()


@pytest.mark.parametrize("rows", [0, 3, 6])
def test_equal_splits(pool3: RankPool, rows: int):
    tensors = [torch.arange(rows * 2).view(rows, 2) + 100 * rank for rank in range(3)]
    for rank, (plain, paired, *splits) in enumerate(pool3.run(_equal_parts, rows)):
        expected = torch.cat([tensor.chunk(3)[rank] if rows else tensor for tensor in tensors])
        assert torch.equal(plain, expected)
        assert torch.equal(paired, expected)
        assert splits == [[rows // 3] * 3] * 2
