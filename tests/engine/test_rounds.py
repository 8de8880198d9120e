"""Several batches in one round over TCP: each is begun before those who wait for the last go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.execution.executor import Executor
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.transport.network.tcp import TcpTransport
from tests.effort import examples
from tests.ranks import RankPool

OVER_TCP = {"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_FUSION_THRESHOLD": str(512 * 1024)}
LARGE = 50_000  # elements: does not travel with the agreement in any type


class Case(NamedTuple):
    """One request for some tensors."""

    counts: list[int]
    dtype: str
    op: str
    wire: str | None
    prescale: float
    is_exclusive: bool


cases = st.builds(
    Case,
    counts=st.lists(st.sampled_from([1, 1000, LARGE, 200_000]), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "int32"]),
    op=st.sampled_from(["SUM", "AVERAGE", "MAX"]),
    wire=st.sampled_from([None, "bfloat16"]),
    prescale=st.sampled_from([1.0, 2.0]),
    is_exclusive=st.booleans(),
)


@pytest.fixture(scope="module", params=[2, 3])
def tcp_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param, env=OVER_TCP)
    yield pool
    pool.close()


def values(rank: int, place: int, count: int, dtype: str) -> torch.Tensor:
    """Small even integers: whatever is done with them, results are exact in every type."""
    return ((torch.arange(count) * (place + 1) + rank) % 7 * 6).to(getattr(torch, dtype))


def submit(name: str, case: Case) -> Request:
    rank = runtime.topology.rank
    tensors = [values(rank, place, count, case.dtype) for place, count in enumerate(case.counts)]
    wire = case.wire if case.dtype == "float32" else None
    wire_type = None if wire is None else getattr(torch, wire)
    reduction = Reduction(ReduceOp[case.op], case.prescale, 1.0, wire_type)
    collective = Collective(Kind.ALLREDUCE, name, reduction=reduction)
    return runtime.submit(
        collective, tensors, tensors, background=False, is_exclusive=case.is_exclusive
    )


def in_one_round(chosen: list[Case]) -> list[list[torch.Tensor]]:
    requests = [submit(f"r{number}", case) for number, case in enumerate(chosen)]
    requests[-1].wait()
    return [list(request.wait()) for request in requests]


def expected(size: int, place: int, count: int, case: Case) -> torch.Tensor:
    inputs = torch.stack(
        [values(rank, place, count, case.dtype).double() * case.prescale for rank in range(size)]
    )
    if case.op == "MAX":
        return inputs.amax(0)
    total = inputs.sum(0)
    if case.op == "SUM":
        return total
    return total / size if case.dtype != "int32" else (total / size).trunc()


@settings(max_examples=examples(25), deadline=None)
@given(chosen=st.lists(cases, min_size=2, max_size=6))
def test_batches_that_follow_each_other_are_right(tcp_pool: RankPool, chosen: list[Case]) -> None:
    results = tcp_pool.run(in_one_round, chosen)
    for number, case in enumerate(chosen):
        for place, count in enumerate(case.counts):
            tensors = [ranks_results[number][place] for ranks_results in results]
            wanted = expected(tcp_pool.size, place, count, case)
            torch.testing.assert_close(tensors[0].double(), wanted, rtol=1e-2, atol=0)
            assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)


FLOATS = Case([LARGE], "float32", "SUM", None, 1.0, is_exclusive=True)


def completions_when_begun(dtypes: list[str]) -> list[list[bool]]:
    """For every collective that was begun ahead, which requests had completed by then."""
    requests: list[Request] = []
    seen = []
    begin = TcpTransport.begin_allreduce

    def watched(*what: Any) -> None:
        seen.append([request.done() for request in requests])
        begin(*what)

    with mock.patch.object(TcpTransport, "begin_allreduce", watched):
        for number, dtype in enumerate(dtypes):
            requests.append(submit(f"b{number}", FLOATS._replace(dtype=dtype)))
        requests[-1].wait()
    return seen


def test_a_batch_is_begun_before_the_last_one_completes(tcp_pool: RankPool) -> None:
    """... so that the link is busy while whoever waited for the last one computes."""
    for seen in tcp_pool.run(completions_when_begun, ["float32"] * 3):
        assert seen == [[False, False, False], [True, False, False]]


def test_integers_are_not_begun_ahead(tcp_pool: RankPool) -> None:
    """Their average is not something that a transport could do."""
    for seen in tcp_pool.run(completions_when_begun, ["float32", "int32", "float32"]):
        assert seen == [[True, False, False]]


def fail_to_begin() -> tuple[bool, str]:
    with mock.patch.object(Executor, "begin", side_effect=MemoryError("no room")):
        first, second = submit("first", FLOATS), submit("second", FLOATS)
        with pytest.raises(HorovodInternalError) as caught:
            second.wait()
    wanted = expected(runtime.topology.size, 0, LARGE, FLOATS)
    return torch.equal(first.wait()[0].double(), wanted), str(caught.value)


def test_who_has_a_result_keeps_it_when_the_next_cannot_begin() -> None:
    pool = RankPool(2, env=OVER_TCP)
    try:
        for kept, message in pool.run(fail_to_begin):
            assert kept
            assert "MemoryError: no room" in message
            assert "'allreduce.second'" in message
            assert "test_rounds.py" in message
    finally:
        pool.close(orderly=False)
