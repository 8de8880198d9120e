"""What the ranks agree on in an optimizer's first step: proposals in, the same record out."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import horovod.torch as hvd
from horovod.common.process_sets import global_process_set
from horovod.torch.gradients.agreement import TUNABLE, Agreement, agree, greatest, order_of, propose
from tests.ranks import RankPool, run_ranks

COUNT = 3  # parameters
numbers = st.integers(0, 1 << 40)
proposals = st.builds(
    Agreement,
    number=numbers,
    overlap=st.booleans(),
    spare_cores=st.booleans(),
    fusion_threshold=numbers,
    autotune=st.booleans(),
    num_warmup=numbers,
    num_steps=numbers,
    most_samples=numbers,
    fixed=st.frozensets(st.sampled_from(TUNABLE)),
    order=st.permutations(range(COUNT)).map(tuple),
    sparse_dims=st.tuples(*[st.integers(0, 3)] * COUNT),
)


def _together(proposals: list[Agreement]) -> Agreement:
    """As `agree` does it, without other ranks."""
    columns = zip(*(proposal.numbers() for proposal in proposals), strict=True)
    return proposals[0].outcome([float(max(column)) for column in columns])


@given(proposals)
def test_a_rank_agrees_with_itself(proposal: Agreement):
    assert _together([proposal]) == proposal


@given(st.lists(proposals, min_size=1, max_size=4))
def test_what_counts_of_several_proposals(proposals: list[Agreement]):
    first, *others = proposals
    proposals = [first, *(replace(other, order=(0,) * COUNT) for other in others)]
    found = _together(proposals)
    assert found == _together(proposals[::-1]), "ranks would differ"
    assert found.overlap == all(each.overlap for each in proposals)
    assert found.spare_cores == all(each.spare_cores for each in proposals)
    assert found.autotune == all(each.autotune for each in proposals)
    assert found.fusion_threshold == min(each.fusion_threshold for each in proposals)
    for name in ("number", "num_warmup", "num_steps", "most_samples"):
        assert getattr(found, name) == max(getattr(each, name) for each in proposals)
    assert found.fixed == frozenset().union(*(each.fixed for each in proposals))
    assert found.order == first.order
    assert list(found.sparse_dims) == [
        max(dims) for dims in zip(*(each.sparse_dims for each in proposals), strict=True)
    ]


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [((), [3, 2, 1, 0]), ((1, 3), [1, 3, 2, 0]), ((0, 0, 1, 2, 3), [0, 1, 2, 3])],
)
def test_gradients_that_did_not_arrive_come_last(arrivals: tuple[int, ...], expected: list[int]):
    assert list(order_of(arrivals, 4)) == expected


def _differing(rank: int, size: int) -> Any:
    os.environ["HOROVOD_FUSION_THRESHOLD"] = str(1000 + rank)
    if rank == 1:
        os.environ["HOROVOD_CYCLE_TIME"] = "2"
    hvd.init()
    arrivals = [[2, 0], [1]][rank]
    proposal = propose(overlap=rank == 0, direct=True, arrivals=arrivals, sparse_dims=[0, rank, 0])
    return agree(proposal, global_process_set)


def test_ranks_with_different_environments():
    first, second = run_ranks(_differing, 2)
    assert first == second
    agreed, complete = first
    assert complete
    assert agreed.number == 0
    assert not agreed.overlap
    assert not agreed.direct, "one rank's gradients are sparse"
    assert agreed.fusion_threshold == 1000
    assert agreed.fixed == {"fusion_threshold", "cycle_time"}
    assert agreed.order == (2, 0, 1)
    assert agreed.sparse_dims == (0, 1, 0)


def _numbered() -> tuple[int, int]:
    """Numbers go on from the greatest of any rank, and none comes twice."""
    proposal = propose(overlap=False, direct=False, arrivals=[], sparse_dims=[0])
    ahead = replace(proposal, number=proposal.number + 5 * hvd.rank())
    first, _ = agree(ahead, global_process_set)
    second, _ = agree(propose(False, False, [], [0]), global_process_set)
    return first.number, second.number


def test_numbers_of_optimizers(pool2: RankPool):
    first, second = pool2.run(_numbered)
    assert first == second
    assert first[1] == first[0] + 1


def _joined(first: int) -> Any:
    """Rank `first` has joined while the others agree."""
    found: Any = None
    if hvd.rank() != first:
        proposal = propose(overlap=True, direct=True, arrivals=[0], sparse_dims=[0, 0])
        agreed, complete = agree(proposal, global_process_set)
        times, present = greatest([0.25 * hvd.rank()], global_process_set)
        found = agreed.order, agreed.overlap, complete, times, present
    hvd.join()
    return found


@pytest.mark.parametrize("joined", [0, 1])
def test_while_a_rank_has_joined(pool2: RankPool, joined: int):
    found = pool2.run(_joined, joined)[1 - joined]
    order = (1, 0) if joined == 0 else (0, 1)
    present = [joined != 0, joined != 1]
    assert found == (order, True, False, [0.25 * (1 - joined)], present)
