"""The search settles, on something that is no slower than the default, and finds what there is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.engine.autotune import NUM_PAIRS, Tuner


@dataclass(frozen=True)
class Point:
    x: int = 0
    y: int = 0


def _stages(num_x: int, num_y: int) -> list[Callable[[Point], Iterator[Point]]]:
    return [
        lambda best: (replace(best, x=x) for x in range(num_x)),
        lambda best: (replace(best, y=y) for y in range(num_y)),
    ]


def _settle(tuner: Tuner[Point], cost: Callable[[Point], float]) -> list[tuple[str, Point]]:
    """Feed the tuner until it settles; what it asked for, and in which phase."""
    asked = []
    while not tuner.settled:
        asked.append((tuner.phase, tuner.current))
        tuner.add(cost(tuner.current))
        assert len(asked) < 1000
    assert tuner.current == tuner.best
    return asked


def _costs(least: float) -> st.SearchStrategy[dict[Point, float]]:
    """How long a step takes at each of 5 x 4 points."""
    points = [Point(x, y) for x in range(5) for y in range(4)]
    many = st.lists(st.floats(least, 10.0), min_size=len(points), max_size=len(points))
    return many.map(lambda costs: dict(zip(points, costs, strict=True)))


@given(_costs(0.1), st.integers(0, 4), st.integers(1, 12))
def test_without_noise_it_finds_the_best_of_each_stage(
    costs: dict[Point, float], num_warmup: int, most_samples: int
):
    tuner = Tuner(Point(), _stages(5, 4), num_warmup, most_samples)
    asked = _settle(tuner, costs.__getitem__)
    phases = [phase for phase, _ in asked]
    assert phases[:num_warmup] == ["warm-up"] * num_warmup
    tried = [point for phase, point in asked if phase == "search"]
    assert len(tried) == len(set(tried)) == min(most_samples, 1 + 4 + 3)
    assert tried[0] == Point()
    assert {point for phase, point in asked if phase == "warm-up"} <= {Point()}
    first = min(tried[:5], key=costs.__getitem__)
    assert all(point.x == first.x for point in tried[5:])
    found = min(tried, key=costs.__getitem__)
    compared = [point for phase, point in asked if phase == "comparison"]
    assert sorted(compared, key=repr) == (
        [] if found == Point() else sorted([Point(), found] * NUM_PAIRS, key=repr)
    )
    expected = found if costs[Point()] / costs[found] > 1.02 else Point()
    assert tuner.best == expected
    assert tuner.seconds == costs[expected]


@given(_costs(0.1), st.randoms(use_true_random=False), st.floats(0, 0.009))
def test_noise_never_makes_it_slower_than_the_default_by_two_percent(
    costs: dict[Point, float], chance: random.Random, noise: float
):
    tuner = Tuner(Point(), _stages(5, 4), 1, 20)
    _settle(tuner, lambda point: costs[point] * chance.uniform(1 - noise, 1 + noise))
    assert costs[tuner.best] <= 1.02 * costs[Point()]


@given(_costs(1.03), st.integers(0, 1000), st.floats(1.5, 50))
def test_one_disturbance_does_not_decide(costs: dict[Point, float], when: int, factor: float):
    """The default is the best by 3 %, and one sample in the course of it takes far too long."""
    costs[Point()] = 1.0
    num_samples = len(_settle(Tuner(Point(), _stages(5, 4), 2, 20), costs.__getitem__))
    tuner = Tuner(Point(), _stages(5, 4), 2, 20)
    number = iter(range(1000))
    bad = when % num_samples

    def cost(point: Point) -> float:
        return costs[point] * (factor if next(number) == bad else 1)

    _settle(tuner, cost)
    assert tuner.best == Point()


@pytest.mark.parametrize("growth", [0.97, 1.03])
@pytest.mark.parametrize("gain", [0.9, 1.1])
def test_a_drift_does_not_decide(growth: float, gain: float):
    """The machine becomes slower, or faster, with each sample: the better setting wins anyway."""
    tuner = Tuner(Point(), _stages(2, 1), 0, 20)
    number = iter(range(1000))
    costs = {Point(): 1.0, Point(1): 1 / gain}
    _settle(tuner, lambda point: costs[point] * growth ** next(number))
    assert tuner.best == (Point(1) if gain > 1 else Point())


def test_nothing_to_choose_from():
    tuner = Tuner(Point(), [], 2, 20)
    asked = _settle(tuner, lambda _: 3.0)
    assert asked == [("warm-up", Point())] * 2 + [("search", Point())]
    assert (tuner.best, tuner.seconds) == (Point(), 3.0)
    with pytest.raises(ValueError, match="over"):
        tuner.add(1.0)


def test_a_clock_that_does_not_advance():
    tuner = Tuner(Point(), _stages(3, 1), 0, 20)
    _settle(tuner, lambda point: 0.0 if point.x == 2 else 1.0)
    assert tuner.best == Point()
