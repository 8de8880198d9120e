"""Who is slow, who is only last by chance, and which ranks outnumber their cores."""

from __future__ import annotations

import math
import random

import pytest

from horovod.observe.reports.slow_ranks import (
    HostLoad,
    chance_of,
    describe_crowded,
    find_crowded,
    find_slow_ranks,
)


def noisy(seed: int, means: list[float], steps: int = 80) -> dict[int, list[float]]:
    dice = random.Random(seed)
    return {
        rank: [mean * math.exp(dice.gauss(0, 0.05)) for _ in range(steps)]
        for rank, mean in enumerate(means)
    }


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_nobody_is_slow_if_all_are_alike(ranks):
    found = [find_slow_ranks(noisy(seed, [10.0] * ranks), 0.0) for seed in range(200)]
    assert sum(each is not None for each in found) <= 2


@pytest.mark.parametrize(
    ("means", "slow"),
    [
        ([10.0, 12.0], (1,)),
        ([10.0, 10.0, 13.0, 10.0], (2,)),
        ([10.0, 10.0, 13.0, 13.0], (2, 3)),
        ([10.0, 13.0, 13.0, 13.0, 10.0, 10.0, 10.0], (1, 2, 3)),
    ],
)
def test_slow_ranks_are_found_with_what_they_cost(means, slow):
    found = find_slow_ranks(noisy(1, means), least_gap=0.5)
    assert found is not None
    assert found.ranks == slow
    excess = max(means) - min(means)
    assert found.excess == pytest.approx(excess, abs=0.4)
    assert excess / 2 < found.cost < excess * 1.1
    assert found.times_last > 0.9 * found.num_steps


def test_one_fast_rank_makes_no_others_slow():
    assert find_slow_ranks(noisy(1, [5.0, 10.0, 10.0, 10.0]), least_gap=0.5) is None


def test_an_excess_that_is_certain_and_small_is_not_worth_a_word():
    times = {0: [10.0] * 50, 1: [10.1] * 50}
    assert find_slow_ranks(times, least_gap=0.5) is None
    assert find_slow_ranks(times, least_gap=0.05) is not None


def test_a_few_steps_prove_nothing():
    times = {0: [10.0] * 5, 1: [15.0] * 5}
    assert find_slow_ranks(times, least_gap=0.5) is None


def test_a_rank_that_was_slow_for_a_while_is_not_slow():
    times = {0: [10.0] * 80, 1: [14.0] * 45 + [9.9] * 35}
    assert find_slow_ranks(times, least_gap=0.5) is None


def test_often_enough_and_not():
    """The case of a balanced job in which a rank was last in 41 of 77 steps."""
    assert chance_of(41, 77, 0.5) > 0.5
    assert chance_of(60, 77, 0.5) < 1e-4
    assert chance_of(10, 10, 0.5) == pytest.approx(2**-10)
    assert chance_of(3, 10, 0.5) == 1.0


def test_without_ranks_or_steps_there_is_nothing_to_find():
    assert find_slow_ranks({}, 0.1) is None
    assert find_slow_ranks({0: [1.0]}, 0.1) is None
    assert find_slow_ranks({0: [], 1: []}, 0.1) is None


# -- ranks that outnumber the cores of their hosts -------------------------------------------------


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
