"""Whether gradients are reduced beside backward, and in buckets of what size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.torch.overlap import (
    LARGEST_BUCKET,
    MEBIBYTE,
    SMALLEST_BUCKET,
    SMALLEST_NETWORK_BUCKET,
    can_overlap,
    device_bucket,
    network_bucket,
    num_early,
    pays_beside_backward,
)

totals = st.integers(0, 1 << 40)
limits = st.integers(0, 1 << 33)
seconds = st.one_of(st.floats(-1.0, 0.0), st.floats(1e-9, 100.0))


@pytest.mark.parametrize(
    ("on_device", "over_network", "expected"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, True)],
)
def test_beside_backward_on_a_device_or_a_network_only(
    on_device: bool, over_network: bool, expected: bool
):
    assert can_overlap(on_device, over_network, None) is expected
    for wanted in (True, False):
        assert can_overlap(on_device, over_network, wanted) is wanted, "the user decides"


@pytest.mark.parametrize(
    ("total", "expected"),
    [(0, 8), (8, 8), (100, 25), (400, 100), (4000, 128)],
)
def test_a_device_takes_a_quarter_at_a_time(total: int, expected: int):
    assert device_bucket(total * MEBIBYTE, 1 << 40) == expected * MEBIBYTE


@pytest.mark.parametrize(
    ("total", "took", "expected"),
    [
        (100, 0.8, 1.0),  # about 1 Gbit/s
        (100, 0.08, 10.0),
        (100, 0.0008, 128.0),
        (100, 80.0, 1.0),
        (1, 0.0, 8.0),  # too fast to be measured
        (1, -1.0, 8.0),
    ],
)
def test_a_network_takes_what_it_moves_in_8_ms(total: int, took: float, expected: float):
    found = network_bucket(total * MEBIBYTE, 1 << 40, took)
    assert found == pytest.approx(expected * MEBIBYTE, abs=2)


@given(totals, limits, seconds)
def test_never_more_than_the_user_allows(total: int, limit: int, took: float):
    assert device_bucket(total, limit) <= limit
    assert network_bucket(total, limit, took) <= limit


@given(totals, seconds)
def test_bounds(total: int, took: float):
    assert SMALLEST_BUCKET <= device_bucket(total, 1 << 40) <= LARGEST_BUCKET
    assert SMALLEST_NETWORK_BUCKET <= network_bucket(total, 1 << 40, took) <= LARGEST_BUCKET


@given(totals, st.floats(1e-6, 10.0), st.floats(1.0, 10.0))
def test_a_slower_network_never_gets_larger_buckets(total: int, took: float, slower: float):
    fast, slow = (network_bucket(total, 1 << 40, t) for t in (took, took * slower))
    assert slow <= fast


@given(st.integers(1, 1 << 40), st.floats(1e-6, 1e3))
def test_what_a_core_cannot_keep_up_with_is_not_worth_a_thread(total: int, seconds: float):
    slower = pays_beside_backward(total, 2 * seconds)
    assert slower or not pays_beside_backward(total, seconds), "a slower network pays rather"
    assert pays_beside_backward(total, total / 100e6), "1 Gbit/s"
    assert not pays_beside_backward(total, total / 1.2e9), "10 Gbit/s"


@given(st.lists(st.integers(1, 1000), max_size=20), st.floats(0, 1e4))
def test_backward_hides_a_first_part_of_the_buckets(sizes: list[int], hidden: float):
    early = num_early(sizes, hidden)
    assert min(1, len(sizes)) <= early <= len(sizes)
    if early > 1:
        assert sum(sizes[: early - 1]) + sizes[early - 1] / 2 <= hidden
    if early < len(sizes):
        assert sum(sizes[:early]) + sizes[early] / 2 > hidden
