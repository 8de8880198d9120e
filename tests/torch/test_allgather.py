"""allgather, alone and grouped, with uneven first dimensions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.torch as hvd
from tests.effort import examples
from tests.ranks import RankPool
from tests.torch.reference import Case, every_dtype, layouts, row_shapes

FORMS = {
    "allgather": hvd.allgather,
    "allgather_async": lambda *a: hvd.synchronize(hvd.allgather_async(*a)),
}
GROUP_FORMS = {
    "grouped_allgather": hvd.grouped_allgather,
    "grouped_allgather_async": lambda *a: hvd.synchronize(hvd.grouped_allgather_async(*a)),
}


def _gather(form: str, by_rank: list[Case], name: str | None) -> torch.Tensor:
    return FORMS[form](by_rank[hvd.rank()].tensor(hvd.rank()), name)


@given(
    rows=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    shape=row_shapes,
    dtype=every_dtype,
    layout=layouts,
    form=st.sampled_from(sorted(FORMS)),
    name=st.none() | st.text(),
)
@settings(max_examples=examples(150), deadline=None)
def test_rows_of_all_ranks(pool3: RankPool, rows, shape, dtype, layout, form, name):
    by_rank = [Case(dtype, (count, *shape), layout, seed=7) for count in rows]
    expected = torch.cat([case.tensor(rank) for rank, case in enumerate(by_rank)])
    for result in pool3.run(_gather, form, by_rank, name):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def _gather_group(form: str, by_rank: list[list[Case]]) -> list[torch.Tensor]:
    rank = hvd.rank()
    results = GROUP_FORMS[form]([case.tensor(rank) for case in by_rank[rank]])
    assert isinstance(results, tuple)
    return list(results)


@given(
    members=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=3, max_size=3), row_shapes, every_dtype),
        min_size=1,
        max_size=4,
    ),
    form=st.sampled_from(sorted(GROUP_FORMS)),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_group_of_tensors_of_any_types(pool3: RankPool, members, form):
    by_rank = [
        [
            Case(dtype, (rows[rank], *shape), seed=n)
            for n, (rows, shape, dtype) in enumerate(members)
        ]
        for rank in range(3)
    ]
    for results in pool3.run(_gather_group, form, by_rank):
        for n, result in enumerate(results):
            expected = torch.cat([by_rank[rank][n].tensor(rank) for rank in range(3)])
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


def _large() -> bool:
    rank = hvd.rank()
    gathered = hvd.allgather(torch.full((300_000 * (rank + 1), 2), float(rank)))
    parts = gathered.split([300_000, 600_000])
    return all(bool((part == rank).all()) for rank, part in enumerate(parts))


def test_large_uneven_parts(pool2: RankPool):
    assert pool2.run(_large) == [True, True]
