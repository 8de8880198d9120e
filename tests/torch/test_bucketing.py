"""Whether gradients are reduced beside backward, and in which buckets. Without any processes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.torch.gradients.bucketing import (
    DEVICE_BUCKET,
    LARGEST_BUCKET,
    MEBIBYTE,
    OVERLAP_KNOB,
    SIZE_KNOB,
    SMALLEST_BUCKET,
    SMALLEST_HOST_BUCKET,
    SMALLEST_NETWORK_BUCKET,
    Bucketing,
    BucketPolicy,
    Measurement,
    bucket_title,
    can_overlap,
    cut,
    cut_for_device,
    device_bucket,
    first_bucket,
    hides_more,
    last_buckets,
    network_bucket,
    num_hidden,
    pays_beside_backward,
)

totals = st.integers(0, 1 << 40)
limits = st.integers(0, 1 << 33)
seconds = st.one_of(st.floats(-1.0, 0.0), st.floats(1e-9, 100.0))
flags = st.booleans()
policies = st.builds(
    BucketPolicy,
    num_bytes=totals,
    limit=limits,
    overlap=flags,
    on_device=flags,
    crosses_hosts=flags,
    spare_cores=flags,
    fixed=st.frozensets(st.sampled_from([OVERLAP_KNOB, SIZE_KNOB, "cycle_time"])),
    autotune=flags,
    grouped=flags,
    hooked=flags,
    delayed=flags,
)

TOTAL, LIMIT = 100 * MEBIBYTE, 64 * MEBIBYTE
ONE_HOST = BucketPolicy(
    num_bytes=TOTAL,
    limit=LIMIT,
    overlap=False,
    on_device=False,
    crosses_hosts=False,
    spare_cores=True,
)
DEVICE = replace(ONE_HOST, overlap=True, on_device=True)
HOSTS = replace(ONE_HOST, overlap=True, crosses_hosts=True)


# -- the policy ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "changes", "overlap", "measurement"),
    [
        (DEVICE, {}, True, Measurement.NOTHING),
        (DEVICE, {"overlap": False}, False, Measurement.NOTHING),
        (DEVICE, {"crosses_hosts": True}, True, Measurement.NOTHING),
        (HOSTS, {}, False, Measurement.NETWORK),
        (HOSTS, {"delayed": True}, False, Measurement.NETWORK),
        (HOSTS, {"fixed": frozenset({OVERLAP_KNOB})}, False, Measurement.NETWORK),
        (HOSTS, {"fixed": frozenset({SIZE_KNOB})}, True, Measurement.NOTHING),
        (HOSTS, {"grouped": True}, True, Measurement.NOTHING),
        (HOSTS, {"overlap": False}, False, Measurement.OVERLAP),
        (ONE_HOST, {}, False, Measurement.OVERLAP),
        (ONE_HOST, {"grouped": True}, False, Measurement.OVERLAP),
        (ONE_HOST, {"spare_cores": False}, False, Measurement.NOTHING),
        (ONE_HOST, {"hooked": True}, False, Measurement.NOTHING),
        (ONE_HOST, {"fixed": frozenset({OVERLAP_KNOB})}, False, Measurement.NOTHING),
        (ONE_HOST, {"overlap": True}, True, Measurement.NOTHING),
        (ONE_HOST, {"autotune": True}, False, Measurement.EVERYTHING),
        (HOSTS, {"autotune": True}, True, Measurement.EVERYTHING),
    ],
)
def test_the_first_steps(
    policy: BucketPolicy, changes: dict[str, Any], overlap: bool, measurement: Measurement
):
    policy = replace(policy, **changes)
    size = first_bucket(TOTAL, LIMIT, policy.on_device)
    assert policy.at_first() == Bucketing(overlap, size, measurement)


@pytest.mark.parametrize(
    ("changes", "rate", "overlap", "measurement"),
    [
        ({}, 100e6, True, Measurement.NOTHING),  # 1 Gbit/s
        ({}, 1.2e9, False, Measurement.OVERLAP),
        ({"spare_cores": False}, 1.2e9, False, Measurement.NOTHING),
        ({"hooked": True}, 1.2e9, False, Measurement.NOTHING),
        ({"on_device": True}, 1.2e9, False, Measurement.NOTHING),
        ({"fixed": frozenset({OVERLAP_KNOB})}, 1.2e9, True, Measurement.NOTHING),
        ({"delayed": True}, 1.2e9, True, Measurement.NOTHING),
    ],
)
def test_after_the_network_was_measured(
    changes: dict[str, Any], rate: float, overlap: bool, measurement: Measurement
):
    took = TOTAL / rate
    decision = replace(HOSTS, **changes).after_trial(took)
    assert decision == Bucketing(overlap, network_bucket(TOTAL, LIMIT, took), measurement)


@given(policies, seconds)
def test_every_decision_keeps_to_what_the_user_and_the_ranks_say(policy: BucketPolicy, took: float):
    first, later = policy.at_first(), policy.after_trial(took)
    for decision in (policy.unmeasured(), first, later):
        assert decision.bucket_bytes <= policy.limit
    assert policy.unmeasured().measurement is Measurement.NOTHING
    if not policy.overlap:
        assert not first.overlap, "not all ranks can"
    if first.measurement is Measurement.NETWORK:
        assert policy.crosses_hosts
        assert SIZE_KNOB not in policy.fixed
    if Measurement.OVERLAP in (first.measurement, later.measurement):
        assert policy.spare_cores
        assert OVERLAP_KNOB not in policy.fixed
    assert later.measurement in (Measurement.NOTHING, Measurement.OVERLAP), "it comes to an end"


# -- the sizes of buckets --------------------------------------------------------------------


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
    assert first_bucket(total * MEBIBYTE, 1 << 40, on_device=True) == expected * MEBIBYTE


@pytest.mark.parametrize(
    ("total", "expected"),
    [(0, 0.5), (1, 0.5), (4, 1), (100, 25), (4000, 128)],
)
def test_a_host_takes_a_quarter_too_but_less_at_least(total: int, expected: float):
    assert first_bucket(total * MEBIBYTE, 1 << 40, on_device=False) == expected * MEBIBYTE


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


@given(totals, limits, seconds, flags)
def test_never_more_than_the_user_allows(total: int, limit: int, took: float, on_device: bool):
    assert first_bucket(total, limit, on_device) <= limit
    assert network_bucket(total, limit, took) <= limit


@given(totals, seconds)
def test_bounds(total: int, took: float):
    assert SMALLEST_BUCKET <= first_bucket(total, 1 << 40, True) <= LARGEST_BUCKET
    assert SMALLEST_HOST_BUCKET <= first_bucket(total, 1 << 40, False) <= LARGEST_BUCKET
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


def test_a_core_keeps_up_with_500_megabytes_a_second():
    assert pays_beside_backward(10**9, 2.01)
    assert not pays_beside_backward(10**9, 1.99)


@given(st.lists(st.integers(1, 20), max_size=20), st.floats(0, 200))
def test_backward_hides_the_first_buckets(sizes: list[int], hidden: float):
    count = num_hidden(sizes, hidden)
    early = sum(sizes[:count])
    if count:
        assert early - hidden <= (sizes[count - 1] + 1) / 2, "most of the last one is hidden"
    if count < len(sizes):
        assert hidden - early <= (sizes[count] + 1) / 2, "and not most of the next"


@pytest.mark.parametrize(
    ("sizes", "hidden", "count"),
    [
        ([4, 4, 4, 4], 8, 2),
        ([4, 4, 4, 4], 10, 2),
        ([4, 4, 4, 4], 11, 3),
        ([4, 4], 100, 2),
        ([9, 1, 1], 0, 0),
        ([9, 1, 1], 4, 0),
        ([9, 1, 1], 8, 1),
        ([4, 4], math.inf, 2),
        ([], 5, 0),
    ],
)
def test_what_backward_hides_is_not_held_back(sizes: list[int], hidden: float, count: int):
    assert num_hidden(sizes, hidden) == count


@given(st.integers(1, 10**9), st.floats(0.05, 20), st.floats(1e5, 1e10), st.floats(0.01, 2))
def test_what_backward_hides_is_found_by_looking(
    num_bytes: int, real: float, rate: float, guess: float
):
    """`real` being how much it hides of all bytes, and `guess` how much of that was guessed."""
    hidden = guess * real * num_bytes
    for _looks in range(3):
        idle = max(0.0, real * num_bytes - hidden) / rate
        more = hides_more(num_bytes, hidden, idle, rate)
        if more is None:
            break
        assert more > hidden
        hidden = more
    assert more is None, "settled soon"
    assert hidden >= min(num_bytes, real * num_bytes) - 0.021 * num_bytes
    assert hidden <= max(guess, 1.001) * real * num_bytes, "and no more than that"


# -- who travels with whom -------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 200), st.integers(0, 99)
)
def test_every_gradient_is_in_one_bucket_and_no_bucket_could_take_the_next(
    sizes: list[int], most: int, more: int
):
    parts = cut(sizes, most, most + more)
    assert list(chain.from_iterable(parts)) == list(range(len(sizes))), "all, in their order"
    for part in parts:
        *little, last = (sizes[index] for index in part)
        if sum(little) + last > most and little:
            assert last > most, "by itself as well"
            assert sum(little) <= most // 8
            assert sum(little) + last <= most + more
    for part, after in pairwise(parts):
        assert sum(sizes[index] for index in part) + sizes[after[0]] > most


@pytest.mark.parametrize(
    ("sizes", "most", "lengths"),
    [
        ([4, 4, 4], 8, [2, 1]),
        ([9, 1, 1], 8, [1, 2]),
        ([2, 9], 8, [1, 1]),
        ([1, 9, 1, 9, 1], 8, [2, 2, 1]),
        ([1, 20], 8, [1, 1]),
        ([1, 8], 8, [1, 1]),
        ([0, 0], 0, [2]),
    ],
)
def test_cuts(sizes: list[int], most: int, lengths: list[int]):
    assert [len(part) for part in cut(sizes, most, limit=16)] == lengths


@given(
    st.lists(st.tuples(st.integers(1, 60 * MEBIBYTE), st.sampled_from("ab")), min_size=1),
    st.integers(MEBIBYTE, 200 * MEBIBYTE),
    st.booleans(),
    st.integers(1, 64),
)
def test_buckets_of_a_device(
    gradients: list[tuple[int, str]], limit: int, delayed: bool, ranks: int
):
    sizes, kinds = [size for size, _ in gradients], [kind for _, kind in gradients]
    most = device_bucket(limit, delayed)
    buckets = cut_for_device(sizes, kinds, most, limit, last_buckets(ranks))
    assert sorted(chain(*buckets)) == list(range(len(sizes)))
    assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets)
    for bucket in buckets:
        assert len({kinds[index] for index in bucket}) == 1
        assert bucket == sorted(bucket)
        assert len(bucket) == 1 or sum(sizes[index] for index in bucket) <= limit


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, [8, 25, 25, 20, 10, 5, 5]),
        (2, [8, 25, 25, 20, 10, 5, 5]),
        (4, [8, 25, 25, 20, 12, 8]),
        (256, [8, 25, 25, 25, 15]),
    ],
)
def test_the_buckets_of_resnet_50_on_a_device(ranks: int, expected: list[int]):
    sizes = [8 * MEBIBYTE, *[MEBIBYTE] * 90]
    last = last_buckets(ranks)
    buckets = cut_for_device(sizes, ["float32"] * 91, DEVICE_BUCKET, 128 * MEBIBYTE, last)
    assert [sum(sizes[index] for index in bucket) // MEBIBYTE for bucket in buckets] == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # A bias and the matrix after it: the bias alone is not worth a reduction.
        ([4_000, 8_192_000, 9_437_184], [[0, 1], [2]]),
        # An MLP 784-1024-1024-10, as its gradients arrive.
        ([40, 40_960, 4_096, 4_194_304, 4_096, 3_211_264], [[0, 1, 2, 3], [4, 5]]),
        # A first bucket that is worth one.
        ([900_000, 8_192_000, 9_437_184], [[0], [1], [2]]),
    ],
)
def test_little_goes_with_the_next_gradient(sizes: list[int], expected: list[list[int]]):
    kinds = ["float32"] * len(sizes)
    assert cut_for_device(sizes, kinds, DEVICE_BUCKET, 128 * MEBIBYTE) == expected


def test_the_names_of_buckets():
    assert bucket_title(1, 2, ["0.weight"]) == "bucket 1 of 2 (0.weight)"
    assert bucket_title(2, 2, ["a", "b", "c"]) == "bucket 2 of 2 (a to c)"
