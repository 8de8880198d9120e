"""reducescatter, alone and grouped, with rows that do not divide."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.torch as hvd
from horovod.common.reduce_op import ReduceOp
from tests.effort import examples
from tests.ranks import RankPool
from tests.torch.reference import Case, cases

SIMPLE = (ReduceOp.SUM, ReduceOp.AVERAGE)
FORMS = {
    "reducescatter": hvd.reducescatter,
    "reducescatter_async": lambda *a, **k: hvd.synchronize(hvd.reducescatter_async(*a, **k)),
}
GROUP_FORMS = {
    "grouped_reducescatter": hvd.grouped_reducescatter,
    "grouped_reducescatter_async": lambda *a, **k: hvd.synchronize(
        hvd.grouped_reducescatter_async(*a, **k)
    ),
}
rowed_cases = cases(SIMPLE).filter(lambda case: len(case.shape) > 0)


def _options(case: Case) -> dict[str, object]:
    return {
        "op": case.op,
        "prescale_factor": case.prescale,
        "postscale_factor": case.postscale,
    }


def _rows(count: int, size: int) -> list[int]:
    return [count // size + (rank < count % size) for rank in range(size)]


def _check(case: Case, results: list[torch.Tensor]) -> None:
    """The parts have the right sizes and, put together, are the whole reduction."""
    assert [len(result) for result in results] == _rows(case.shape[0], len(results))
    case.check(torch.cat(results), len(results))


def _one(form: str, case: Case, name: str | None) -> torch.Tensor:
    tensor = case.tensor(hvd.rank())
    before = tensor.clone()
    result = FORMS[form](tensor, name=name, **_options(case))
    assert torch.equal(tensor, before)
    return result


@given(case=rowed_cases, form=st.sampled_from(sorted(FORMS)), name=st.none() | st.text())
@settings(max_examples=examples(150), deadline=None)
def test_one_tensor(pool3: RankPool, case: Case, form: str, name: str | None):
    _check(case, pool3.run(_one, form, case, name))


def _group(form: str, cases: list[Case]) -> list[torch.Tensor]:
    results = GROUP_FORMS[form]([case.tensor(hvd.rank()) for case in cases], **_options(cases[0]))
    assert isinstance(results, tuple if "async" in form else list)
    return list(results)


@given(
    chosen=st.lists(rowed_cases, min_size=1, max_size=4),
    op=st.sampled_from(SIMPLE),
    form=st.sampled_from(sorted(GROUP_FORMS)),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_group_of_tensors_of_any_types(pool3: RankPool, chosen, op, form):
    group = [
        Case(torch.uint8 if c.dtype is torch.bool else c.dtype, c.shape, c.layout, op, seed=c.seed)
        for c in chosen
    ]
    by_rank = pool3.run(_group, form, group)
    for case, results in zip(group, zip(*by_rank, strict=True), strict=True):
        _check(case, list(results))


def _large(rows: int) -> torch.Tensor:
    tensor = torch.arange(rows * 4, dtype=torch.float64).view(rows, 4) * (hvd.rank() + 1)
    return hvd.reducescatter(tensor, op=hvd.Sum)


def test_large_uneven_parts(pool2: RankPool):
    rows = 50_001
    whole = torch.arange(rows * 4, dtype=torch.float64).view(rows, 4) * 3
    first, second = pool2.run(_large, rows)
    assert len(first) == 25_001
    assert torch.equal(torch.cat([first, second]), whole)
