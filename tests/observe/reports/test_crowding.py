"""Ranks that outnumber the cores of their hosts: one sentence, and only when it is sure."""

from __future__ import annotations

import pytest

from horovod.observe.reports.crowding import HostLoad, describe_crowded, find_crowded


def crowded(*ranks: tuple[str, set[int] | None]) -> list[HostLoad]:
    """The crowded hosts among those of ranks with these hosts and cores."""
    hosts = {number: host for number, (host, _) in enumerate(ranks)}
    told = {number: frozenset(own) for number, (_, own) in enumerate(ranks) if own is not None}
    return find_crowded(hosts, told)


def test_ranks_that_share_cores():
    ranks = [("a", {0, 1})] * 3 + [("b", {0, 1, 2, 3})] * 3
    assert crowded(*ranks) == [HostLoad("a", 3, 2)]


def test_ranks_that_are_bound_to_cores_of_their_own():
    assert crowded(*(("a", {number}) for number in range(4))) == []
    assert crowded(*(("a", {number % 2}) for number in range(4))) == [HostLoad("a", 4, 2)]


def test_nothing_is_said_before_all_ranks_of_a_host_have_told():
    assert crowded(("a", {0}), ("a", {0}), ("a", None)) == []
    assert crowded(("a", set()), ("a", set())) == []
    assert crowded() == []


@pytest.mark.parametrize(
    ("loads", "hosts", "expected"),
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
def test_one_sentence(loads: list[tuple[str, int, int]], hosts: int, expected: str):
    assert describe_crowded([HostLoad(*each) for each in loads], hosts) == expected


def test_many_hosts_of_several_kinds_are_not_all_named():
    loads = [HostLoad(f"h{n}", 4 + n, 2) for n in range(5)]
    assert describe_crowded(loads, 5).endswith("on h2, and 2 more hosts are alike")
