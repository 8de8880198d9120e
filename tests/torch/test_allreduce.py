"""allreduce in all its forms against a single-process reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.torch as hvd
from horovod.common.reduce_op import ReduceOp
from tests.effort import examples
from tests.ranks import RankPool, run_ranks
from tests.torch.reference import EVERY_DTYPE, Case, cases

NEW = {
    "allreduce": hvd.allreduce,
    "allreduce_async": lambda *a, **k: hvd.synchronize(hvd.allreduce_async(*a, **k)),
}
IN_PLACE = {
    "allreduce_": hvd.allreduce_,
    "allreduce_async_": lambda *a, **k: hvd.synchronize(hvd.allreduce_async_(*a, **k)),
}
NEW_GROUP = {
    "grouped_allreduce": hvd.grouped_allreduce,
    "grouped_allreduce_async": lambda *a, **k: hvd.synchronize(
        hvd.grouped_allreduce_async(*a, **k)
    ),
}
GROUP_IN_PLACE = {
    "grouped_allreduce_": hvd.grouped_allreduce_,
    "grouped_allreduce_async_": lambda *a, **k: hvd.synchronize(
        hvd.grouped_allreduce_async_(*a, **k)
    ),
}
ONE = [*NEW, *IN_PLACE]
SEVERAL = [*NEW_GROUP, *GROUP_IN_PLACE]


def _scale(case: Case) -> dict[str, Any]:
    return {
        "op": case.op,
        "prescale_factor": case.prescale,
        "postscale_factor": case.postscale,
    }


def _one(form: str, case: Case, name: str | None) -> torch.Tensor:
    tensor = case.tensor(hvd.rank())
    before = tensor.clone()
    if form in IN_PLACE:
        result = IN_PLACE[form](tensor, name=name, **_scale(case))
        assert result is tensor
    else:
        result = NEW[form](tensor, name=name, **_scale(case))
        assert torch.equal(tensor, before)
        assert result.is_contiguous()
    return result.clone()


def _group(form: str, cases: list[Case]) -> list[torch.Tensor]:
    tensors = [case.tensor(hvd.rank()) for case in cases]
    before = [tensor.clone() for tensor in tensors]
    if form in GROUP_IN_PLACE:
        results = GROUP_IN_PLACE[form](tensors, **_scale(cases[0]))
        assert all(a is b for a, b in zip(results, tensors, strict=True))
    else:
        results = NEW_GROUP[form](tensors, **_scale(cases[0]))
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    return [result.clone() for result in results]


def _check_everywhere(case: Case, results: list[torch.Tensor]) -> None:
    for result in results:
        case.check(result, len(results))
        # Bitwise: NaNs and signed zeros would count too.
        assert _bits(result) == _bits(results[0])


def _bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


@given(case=cases(), form=st.sampled_from(ONE), name=st.none() | st.text())
@settings(max_examples=examples(200), deadline=None)
def test_one_tensor(pool3: RankPool, case: Case, form: str, name: str | None):
    _check_everywhere(case, pool3.run(_one, form, case, name))


@given(case=cases())
@settings(max_examples=examples(50), deadline=None)
def test_four_ranks(pool4: RankPool, case: Case):
    _check_everywhere(case, pool4.run(_one, "allreduce_", case, "four"))


@given(data=st.data(), form=st.sampled_from(SEVERAL), case=cases())
@settings(max_examples=examples(100), deadline=None)
def test_a_group_of_tensors_of_any_types(
    pool3: RankPool, data: st.DataObject, form: str, case: Case
):
    others = data.draw(st.lists(cases((case.op,)), max_size=4))
    unscaled = any(c.dtype is torch.bool for c in (case, *others))
    prescale, postscale = (1.0, 1.0) if unscaled else (case.prescale, case.postscale)
    group = [
        Case(c.dtype, c.shape, c.layout, case.op, prescale, postscale, c.seed)
        for c in (case, *others)
    ]
    by_rank = pool3.run(_group, form, group)
    for case, results in zip(group, zip(*by_rank, strict=True), strict=True):
        _check_everywhere(case, list(results))


def _submit_in_own_order(cases: list[Case], orders: list[list[int]]) -> list[torch.Tensor]:
    order = orders[hvd.rank()]
    handles = {
        index: hvd.allreduce_async(
            cases[index].tensor(hvd.rank()), name=f"tensor {index}", **_scale(cases[index])
        )
        for index in order
    }
    return [hvd.synchronize(handles[index]) for index in range(len(cases))]


@given(data=st.data(), chosen=st.lists(cases(), min_size=2, max_size=8))
@settings(max_examples=examples(100), deadline=None)
def test_ranks_submit_in_different_orders(pool3: RankPool, data: st.DataObject, chosen: list[Case]):
    orders = [data.draw(st.permutations(range(len(chosen)))) for _ in range(3)]
    by_rank = pool3.run(_submit_in_own_order, chosen, orders)
    for case, results in zip(chosen, zip(*by_rank, strict=True), strict=True):
        _check_everywhere(case, list(results))


def _random_sum(dtype: torch.dtype, count: int) -> torch.Tensor:
    torch.manual_seed(hvd.rank())
    return hvd.allreduce(torch.randn(count, dtype=dtype), op=hvd.Sum, name="random")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [5, 100_003])
def test_rounding_is_the_same_on_every_rank(pool3: RankPool, dtype: torch.dtype, count: int):
    results = pool3.run(_random_sum, dtype, count)
    assert len({_bits(result) for result in results}) == 1
    inputs = []
    for rank in range(3):
        torch.manual_seed(rank)
        inputs.append(torch.randn(count, dtype=dtype))
    torch.testing.assert_close(results[0], torch.stack(inputs).double().sum(0).to(dtype))


def _at_odd_addresses(counts: list[int]) -> tuple[list[torch.Tensor], list[int]]:
    tensors = []
    for number, count in enumerate(counts):
        memory = torch.empty(4 * count + 8, dtype=torch.uint8).numpy()
        tensor = torch.frombuffer(memory, dtype=torch.float32, offset=1 + number % 3, count=count)
        tensors.append(tensor.copy_(torch.arange(count) % 1000 + hvd.rank()))
    if len(tensors) == 1:
        hvd.allreduce_(tensors[0], name="odd", op=hvd.Average)
    else:
        hvd.grouped_allreduce_(tensors, name="odd group", op=hvd.Average)
    return tensors, [tensor.data_ptr() % 4 for tensor in tensors]


# Little, which travels in a slot; medium; and much, in one tensor, a few, or many of all sizes.
@pytest.mark.parametrize(
    "counts",
    [[100], [10, 1, 30], [100_000], [50_000, 7], [700_000], [300_000, 9, 400_000], [5, 70_000] * 9],
)
def test_tensors_at_odd_addresses(pool2: RankPool, pool3: RankPool, counts: list[int]):
    for pool in (pool2, pool3):
        for results, places in pool.run(_at_odd_addresses, counts):
            assert any(places)
            for result, count in zip(results, counts, strict=True):
                mean = torch.arange(count) % 1000 + (pool.size - 1) / 2
                torch.testing.assert_close(result, mean.float(), rtol=1e-6, atol=1e-6)


def _average_of(values: list[int]) -> int:
    tensor = torch.tensor([values[hvd.rank()]])
    return int(hvd.allreduce(tensor, name="average of integers"))


def test_an_average_of_integers_is_truncated_toward_zero(pool2: RankPool):
    assert pool2.run(_average_of, [2, 3]) == [2, 2]
    assert pool2.run(_average_of, [-2, -3]) == [-2, -2]
    large = 2**62
    assert pool2.run(_average_of, [large - 1, large - 1]) == [large - 1] * 2


def _legacy_average() -> tuple[list[float], list[str]]:
    tensor = torch.tensor([float(hvd.rank() + 1)])
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for average in (True, False):
            results.append(float(hvd.allreduce(tensor, average)))
            results.append(float(hvd.allreduce_(tensor.clone(), average)))
            results.append(float(hvd.grouped_allreduce([tensor], average)[0]))
    places = {warning.filename for warning in caught}
    assert {warning.category for warning in caught} == {DeprecationWarning}
    assert len(caught) == 6
    return results, sorted(places)


def test_the_older_average_flag(pool2: RankPool):
    for results, places in pool2.run(_legacy_average):
        assert results == [1.5, 1.5, 1.5, 3.0, 3.0, 3.0]
        assert places == [__file__]  # the warning points at the caller


def _leaf_in_place() -> tuple[bool, float]:
    parameter = torch.nn.Parameter(torch.ones(3))
    result = hvd.allreduce_(parameter, op=hvd.Sum)
    return result is parameter and parameter.grad_fn is None, float(parameter.detach().sum())


def test_a_parameter_in_place(pool2: RankPool):
    assert pool2.run(_leaf_in_place) == [(True, 6.0)] * 2


def _lazy_views() -> list[torch.Tensor]:
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    target = tensor.clone()
    hvd.allreduce_(target.conj(), op=hvd.Sum)
    return [hvd.allreduce(tensor.conj(), op=hvd.Sum), target]


def test_lazily_conjugated_tensors(pool2: RankPool):
    for new, in_place in pool2.run(_lazy_views):
        assert torch.equal(new.resolve_conj(), torch.tensor([2 - 4j, 6 + 2j]))
        assert torch.equal(in_place, torch.tensor([2 + 4j, 6 - 2j]))


def _adasum(vectors: list[list[float]], dtype: torch.dtype) -> torch.Tensor:
    return hvd.allreduce(torch.tensor(vectors[hvd.rank()], dtype=dtype), op=hvd.Adasum)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_adasum_adds_orthogonal_and_averages_parallel_vectors(pool3: RankPool, dtype):
    orthogonal = [[1.0, 0, 0], [0, 2.0, 0], [0, 0, 4.0]]
    parallel = [[1.0, 2.0, 3.0]] * 3
    for result in pool3.run(_adasum, orthogonal, dtype):
        torch.testing.assert_close(result, torch.tensor([1.0, 2.0, 4.0], dtype=dtype))
    for result in pool3.run(_adasum, parallel, dtype):
        torch.testing.assert_close(result, torch.tensor([1.0, 2.0, 3.0], dtype=dtype))


def _each_dtype_unnamed() -> list[int]:
    """Sums over every type, several of them in flight under automatic names."""
    handles = [hvd.allreduce_async(torch.ones(2, 2).to(dtype), op=hvd.Sum) for dtype in EVERY_DTYPE]
    return [int(hvd.synchronize(handle).real.sum()) for handle in handles]


def test_unnamed_operations_of_every_type(pool2: RankPool):
    expected = [4 if dtype is torch.bool else 8 for dtype in EVERY_DTYPE]
    assert pool2.run(_each_dtype_unnamed) == [expected] * 2


def _alone(rank: int, size: int) -> list[float]:
    hvd.init()
    forms: list[Callable[..., Any]] = [hvd.allreduce, hvd.allreduce_]
    tensor = torch.tensor([3.0])
    return [
        float(form(tensor.clone(), op=op, prescale_factor=2.0))
        for form in forms
        for op in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.ADASUM)
    ]


def _repeat() -> None:
    for number in range(4):
        for shape in ((3,), (2, 2), (8000,)):  # the last is too large to be copied first
            tensor = torch.arange(8000.0)[: torch.Size(shape).numel()].view(shape) + hvd.rank()
            given = tensor.clone()
            result = hvd.allreduce(tensor, name=f"repeated {shape}", op=hvd.Sum)
            assert torch.equal(tensor, given)
            assert torch.equal(result, 2 * given + 1 - 2 * hvd.rank())
            assert result.data_ptr() != tensor.data_ptr()
        # Under the same name come others: not contiguous, with a gradient, by another operation.
        turned = torch.ones(2, 2).t() * (hvd.rank() + number)
        assert torch.equal(
            hvd.allreduce(turned, name="repeated (2, 2)", op=hvd.Sum),
            torch.full((2, 2), 2.0 * number + 1),
        )
        weight = torch.ones(3, requires_grad=True)
        hvd.allreduce(weight, name="repeated (3,)", op=hvd.Sum).sum().backward()
        assert torch.equal(weight.grad, torch.full((3,), 2.0))
        largest = hvd.allreduce(torch.full((3,), float(hvd.rank())), name="most", op=hvd.Max)
        assert torch.equal(largest, torch.ones(3))


def test_a_repeated_name_leaves_the_tensor_alone(pool2: RankPool):
    pool2.run(_repeat)


def test_a_job_of_one_process():
    assert run_ranks(_alone, 1) == [[6.0] * 8]
