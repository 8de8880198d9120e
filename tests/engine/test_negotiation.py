"""What ranks conclude from comparing their queues. Without processes: every rank sees the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod.engine.agreement.negotiation import JOIN, Finding, Queue, _compare

A, B, C = "allreduce.a", "allreduce.b", "allreduce.c"


def queue(*names: str, waiting: str | None = None, **signatures: str) -> Queue:
    """Requests in this order; a signature is the name's own unless said otherwise."""
    return {name: (signatures.get(name[-1], name), name == waiting) for name in names}


def test_what_all_have_runs_in_the_order_of_the_lowest_rank():
    found = _compare([queue(A, B), queue(B, A), queue(B, C, A)], joined=set())
    assert list(found.items()) == [(A, Finding.READY), (B, Finding.READY)]


def test_what_one_has_not_submitted_is_waited_for():
    assert _compare([queue(A), queue(A), queue()], joined=set()) == {}


def test_one_name_for_two_things():
    found = _compare([queue(A, B), queue(A, B, a="another shape")], joined=set())
    assert found == {A: Finding.MISMATCHED, B: Finding.READY}


def test_ranks_that_wait_for_one_label_as_different_operations():
    ranks = [queue(A, waiting=A), queue("broadcast.a", waiting="broadcast.a")]
    assert set(_compare(ranks, set()).values()) == {Finding.CROSSED}
    # Submitted, but nobody waits on one of them: it may still submit the other.
    assert _compare([queue(A, waiting=A), queue("broadcast.a")], set()) == {}


def test_a_rank_that_has_joined_is_stood_in_for_and_never_decides_the_order():
    found = _compare([queue(JOIN), queue(B, A), queue(A, B)], joined={0})
    assert list(found.items()) == [(B, Finding.STOOD_IN_FOR), (A, Finding.STOOD_IN_FOR)]


def test_what_a_rank_submitted_before_it_joined_still_runs():
    assert _compare([queue(A, JOIN), queue(A)], joined={0}) == {A: Finding.READY}


@given(st.lists(st.permutations([A, B, C]), min_size=1, max_size=5))
def test_any_order_of_the_same_requests_is_ready(orders: list[list[str]]):
    found = _compare([queue(*names) for names in orders], joined=set())
    assert list(found) == list(orders[0])
    assert set(found.values()) == {Finding.READY}
