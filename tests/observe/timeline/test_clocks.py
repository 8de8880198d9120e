"""Putting ranks on one clock: hosts' clocks that are off and that drift."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.observe.timeline.clocks import Comparison, align, compare, estimate
from horovod.observe.timeline.recording import interpret
from tests.effort import examples
from tests.observe.timeline.made import Clock, MadeJob, even

OFFSETS = st.floats(-1e12, 1e12, allow_nan=False).map(round)


def disagreement(recordings) -> float:
    """By how much the ranks' moments of agreement differ at most."""
    moments = zip(*[[c.agreed for c in r.collectives] for r in recordings], strict=True)
    return max(max(each) - min(each) for each in moments)


def test_ranks_of_one_host_share_its_clock_whenever_they_began():
    job = even(5, 2)
    first, second = job.events(0), job.events(1)
    # The second rank's recording began 3 s earlier: everything is later in its file.
    for event in second:
        if "ts" in event:
            event["ts"] += 3_000_000
        elif "clock" in event["args"]:
            event["args"]["clock"] -= 3_000_000
            event["args"]["start_time_since_epoch_in_micros"] -= 77  # must not be looked at
    aligned = align([interpret(first), interpret(second)])
    assert disagreement(aligned) == 0


@settings(max_examples=examples(30), deadline=None)
@given(offset=OFFSETS, lateness=st.lists(st.integers(0, 300), min_size=30, max_size=30))
def test_a_shifted_clock_is_found_within_the_median_of_the_delays(offset, lateness):
    jitter = [[0.0, float(late)] for late in lateness]
    compute = [[1000.0 * (step % 3 + 1), 1000.0 * ((step + 1) % 3 + 1)] for step in range(30)]
    job = MadeJob(
        compute, [500.0] * 30, jitter=jitter, hosts=["a", "b"], clocks={"b": Clock(float(offset))}
    )
    recordings = job.recordings()
    difference = estimate(compare(recordings[:1], recordings[1:]))
    ahead = difference.leads[0] + recordings[1].clock - recordings[0].clock
    middle = sorted(lateness)[15]
    assert ahead - offset <= middle + 2
    assert ahead - offset >= -2
    (one, other) = align(recordings)
    for step, (ours, theirs) in enumerate(zip(one.collectives, other.collectives, strict=True)):
        true = job.times(1)[step][1] - job.times(0)[step][1]
        assert theirs.submitted - ours.submitted == pytest.approx(true, abs=middle + 3)


@settings(max_examples=examples(15), deadline=None)
@given(offset=OFFSETS, drift=st.floats(-100, 100), steps=st.integers(40, 100))
def test_a_clock_that_drifts(offset, drift, steps):
    clocks = {"b": Clock(float(offset), drift)}
    job = MadeJob([[1e6, 8e5]] * steps, [1000.0] * steps, hosts=["a", "b"], clocks=clocks)
    # 100 microseconds a second over 100 steps of 1 s: 10 ms that a single difference would miss
    assert disagreement(align(job.recordings())) < 10


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e4)),
        min_size=1,
        max_size=19,
    ),
    st.floats(-1e9, 1e9),
)
def test_the_estimate_is_never_against_causality(drawn, true):
    """Whoever knows of an agreement late, its bounds hold the true difference and the estimate."""
    comparisons = []
    for at, ours_earlier, theirs_earlier, late in drawn:
        comparisons.append(
            Comparison(
                at,
                true + late,
                least_difference=true - theirs_earlier,
                most_difference=true + late + ours_earlier,
            )
        )
    found = estimate(sorted(comparisons, key=lambda each: each.time))
    least = max(each.least_difference for each in comparisons)
    most = min(each.most_difference for each in comparisons)
    assert least - 1e-3 <= found.leads[0] <= most + 1e-3


def test_three_hosts_where_two_have_nothing_in_common_but_the_third():
    job = even(10, 3, hosts=["a", "b", "c"], clocks={"b": Clock(5e6), "c": Clock(-7e9)})
    first, second, third = job.recordings()
    for index, each in enumerate(first.collectives):
        if index % 2:
            each.key = (1, index, each.name)  # of the set of ranks 0 and 1
            second.collectives[index].key = each.key
        else:
            each.key = (5, index, each.name)  # alone
    aligned = align([first, second, third])
    assert disagreement([aligned[1], aligned[2]]) == 0
    assert disagreement([aligned[0], aligned[1]]) == 0


def test_without_anything_in_common_the_time_of_day_counts():
    job = even(
        3, 2, hosts=["a", "b"], clocks={"b": Clock(9e9, epoch=Clock().epoch - 9_000_000_000)}
    )
    first, second = job.recordings()
    for each in second.collectives:
        each.key = (7, *each.key[1:])
    assert disagreement(align([first, second])) == 0


def test_files_of_earlier_versions_are_aligned_by_what_their_ranks_did():
    job = even(40, 2, hosts=["a", "b"])
    old = [replace(r, clock=None, version=1) for r in job.recordings()]
    old[1].started += 123_456  # its host's time of day is wrong
    assert disagreement(align(old)) == 0


def test_time_begins_at_zero_and_ranks_are_in_order():
    recordings = even(3, 3).recordings()
    aligned = align(recordings[::-1])
    assert [each.rank for each in aligned] == [0, 1, 2]
    assert min(span.began for each in aligned for span in each.steps["DistributedOptimizer.0"]) == 0
