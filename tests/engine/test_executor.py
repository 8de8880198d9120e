"""Fused reductions of groups whose tensors are large enough to be reduced where they are."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from tests.effort import examples
from tests.ranks import RankPool, run_ranks

DTYPES = ["float32", "bfloat16", "int32", "float64"]
SMALL, LARGE = [0, 1, 3, 1000], [9_000, 70_001, 300_000]  # elements, below and above all limits


def values(rank: int, index: int, count: int, dtype: str) -> torch.Tensor:
    """Small integers, so that sums over a few ranks are exact in every type."""
    return ((torch.arange(count) * (index + 1) + rank) % 7).to(getattr(torch, dtype))


def reduce_group(
    name: str, counts: list[int], dtype: str, op: str, in_place: bool, prescale: float
) -> list[torch.Tensor]:
    rank = runtime.topology.rank
    tensors = [values(rank, index, count, dtype) for index, count in enumerate(counts)]
    outputs = tensors if in_place else [torch.empty_like(tensor) for tensor in tensors]
    untouched = [tensor.clone() for tensor in tensors]
    reduction = Reduction(ReduceOp[op], prescale, 0.5)
    collective = Collective(Kind.ALLREDUCE, name, reduction=reduction)
    result = runtime.submit(collective, tensors, outputs).wait()
    if not in_place:
        assert all(map(torch.equal, tensors, untouched))
    return list(result)


def check_group(pool: RankPool, *case: object) -> None:
    counts, dtype, op, _, prescale = case[1:]
    results = pool.run(reduce_group, *case)
    for index, count in enumerate(counts):  # type: ignore[arg-type]
        inputs = [values(rank, index, count, str(dtype)) for rank in range(pool.size)]
        total = sum(each.double() * float(prescale) for each in inputs)  # type: ignore[arg-type]
        expected = total * 0.5 / (pool.size if op == "AVERAGE" else 1)
        if not inputs[0].is_floating_point():
            expected = expected.trunc()
        torch.testing.assert_close(results[0][index], expected.to(inputs[0].dtype))
        for others in results[1:]:
            assert torch.equal(others[index], results[0][index])


groups = st.lists(st.sampled_from(SMALL + LARGE), min_size=1, max_size=6)


@settings(max_examples=examples(25), deadline=None)
@given(
    counts=groups,
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["SUM", "AVERAGE"]),
    in_place=st.booleans(),
    prescale=st.sampled_from([1.0, 2.0]),
)
def test_groups_of_large_and_small_tensors(
    pool3: RankPool, counts: list[int], dtype: str, op: str, in_place: bool, prescale: float
) -> None:
    check_group(pool3, "group", counts, dtype, op, in_place, prescale)


def staged_group(rank: int, size: int) -> bool:
    runtime.init()
    same = []
    for step in range(3):
        counts = [*SMALL, *LARGE, 1_000_003]
        result = reduce_group(f"g{step}", counts, "float32", "SUM", True, 1.0)
        for index, count in enumerate(counts):
            total = sum(values(r, index, count, "float32") for r in range(size))
            same.append(torch.equal(result[index], total * 0.5))
    runtime.shutdown()
    return all(same)


def test_without_access_to_each_others_memory() -> None:
    assert run_ranks(staged_group, 2, env={"HOROVOD_SHM_PEER_MEMORY": "0"}) == [True, True]


def test_over_gloo() -> None:
    assert run_ranks(staged_group, 2, env={"HOROVOD_CPU_OPERATIONS": "gloo"}) == [True, True]


def more_tensors_than_one_call_takes(count: int) -> bool:
    tensors = [torch.full((9000,), float(i % 5)) for i in range(count)]
    runtime.submit(Collective(Kind.ALLREDUCE, "many"), tensors, tensors).wait()
    return all(bool((tensor == 2 * (i % 5)).all()) for i, tensor in enumerate(tensors))


def test_more_large_tensors_than_one_call_takes(pool2: RankPool) -> None:
    assert pool2.run(more_tensors_than_one_call_takes, 1500) == [True, True]
