"""Who is slow, and who is only last by chance."""

from __future__ import annotations

import math
import random

import pytest

from horovod.observe.reports.slow_ranks import chance_of, find_slow_ranks


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
