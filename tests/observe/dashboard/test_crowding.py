"""Ranks that outnumber the cores of their hosts: one sentence, and only when it is sure."""

from __future__ import annotations

import pytest

from horovod.observe.dashboard.rank import CrowdedHost, Rank, describe_crowded, find_crowded
from horovod.observe.dashboard.reports import Report


def rank(number: int, host: str, cores: set[int] | None) -> Rank:
    found = Rank(number, str(number), host)
    if cores is not None:
        report = Report(number, 0, 1, 0, host, 1, 0.0, "training", cores=frozenset(cores))
        found.report = report
    return found


def test_ranks_that_share_cores():
    ranks = [rank(number, "a", {0, 1}) for number in range(3)]
    ranks += [rank(number, "b", {0, 1, 2, 3}) for number in range(3, 6)]
    assert find_crowded(ranks) == [CrowdedHost("a", 3, 2)]


def test_ranks_that_are_bound_to_cores_of_their_own():
    assert find_crowded(rank(number, "a", {number}) for number in range(4)) == []
    assert find_crowded(rank(number, "a", {number % 2}) for number in range(4)) == [
        CrowdedHost("a", 4, 2)
    ]


def test_nothing_is_said_before_all_ranks_of_a_host_have_told():
    ranks = [rank(0, "a", {0}), rank(1, "a", {1}), rank(2, "a", None)]
    assert find_crowded(ranks) == []
    assert find_crowded([rank(0, "a", set()), rank(1, "a", set())]) == []
    assert find_crowded([]) == []


@pytest.mark.parametrize(
    ("crowded", "hosts", "expected"),
    [
        ([], 1, ""),
        ([("a", 16, 2)], 1, "16 ranks share 2 cores"),
        ([("a", 2, 1)], 1, "2 ranks share 1 core"),
        ([("a", 16, 2)], 2, "16 ranks share 2 cores on a"),
        ([("a", 4, 2), ("b", 4, 2)], 2, "4 ranks share 2 cores on a, b"),
        ([(f"h{n}", 4, 2) for n in range(9)], 9, "4 ranks share 2 cores on each of 9 hosts"),
        (
            [("a", 4, 2), ("b", 8, 2)],
            2,
            "4 ranks share 2 cores on a, 8 ranks share 2 cores on b",
        ),
    ],
)
def test_one_sentence(crowded: list[tuple[str, int, int]], hosts: int, expected: str):
    assert describe_crowded([CrowdedHost(*each) for each in crowded], hosts) == expected


def test_many_hosts_of_several_kinds_are_not_all_named():
    crowded = [CrowdedHost(f"h{n}", 4 + n, 2) for n in range(5)]
    assert describe_crowded(crowded, 5).endswith("on h2, and 2 more hosts are alike")
