"""Where a step goes and who is late: made-up jobs whose answers are known."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.observe.reports import splitting
from horovod.observe.reports.advice import advise, verdict
from horovod.observe.reports.analysis import analyse
from horovod.observe.reports.losses import Where
from horovod.observe.reports.splitting import PARTS
from horovod.observe.timeline.clocks import align
from horovod.observe.timeline.recording import interpret
from tests.effort import examples
from tests.observe.timeline.made import ROW, Clock, MadeJob, even, with_slow_rank


def found_in(job: MadeJob):
    return analyse(align(job.recordings()))


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), ranks=st.integers(2, 4), steps=st.integers(1, 6), offset=st.integers(-9, 9))
def test_every_part_of_every_step(data, ranks, steps, offset):
    times = st.integers(1000, 4000).map(float)
    row = st.lists(times, min_size=ranks, max_size=ranks)
    compute = data.draw(st.lists(row, min_size=steps, max_size=steps))
    reduction = data.draw(st.lists(times, min_size=steps, max_size=steps))
    hosts = [
        "a",
        *data.draw(st.lists(st.sampled_from("ab"), min_size=ranks - 1, max_size=ranks - 1)),
    ]
    job = MadeJob(compute, reduction, hosts=hosts, clocks={"b": Clock(offset * 1e8)})
    found = found_in(job)
    assert [step.number for step in found.steps] == list(range(steps))
    for step in found.steps:
        last = max(compute[step.number])
        for rank, split in step.ranks.items():
            mine = compute[step.number][rank]
            assert split.compute == pytest.approx(mine, abs=3)
            assert split.wait == pytest.approx(last - mine, abs=3)
            assert split.negotiation == pytest.approx(job.agreeing, abs=3)
            assert split.reduction == pytest.approx(reduction[step.number], abs=3)
            assert split.hidden == pytest.approx(0, abs=3)
            assert split.before_backward == pytest.approx(0.6 * mine, abs=3)
            assert sum(split.part(part) for part in PARTS) == pytest.approx(split.duration)
        order = sorted(compute[step.number])
        others = order[: ranks - 1]
        middle = (others[(ranks - 2) // 2] + others[(ranks - 1) // 2]) / 2
        assert step.lateness == pytest.approx(last - middle, abs=3)
        if last - middle > 150:
            assert compute[step.number][step.slowest] == last


def test_one_slow_rank_is_found_with_all_its_numbers():
    found = found_in(with_slow_rank(20, 3, slow=1))
    assert found.slowest_counts == Counter({1: 20})
    assert found.share(0, "wait") == pytest.approx(5000 / 17_050, abs=1e-3)
    assert found.share(1, "wait") == 0
    assert found.step_time == pytest.approx(17_050)
    (row,) = found.awaited_collectives
    assert (row.name, row.count, row.nbytes, row.tensors) == (ROW, 20, 4_000_000, ("b", "a"))
    assert row.spread == pytest.approx(5000)
    assert row.waited == pytest.approx(20 * 2 * 5000)
    assert (row.last_rank, row.last_share) == (1, 1.0)
    assert (found.collectives_per_step, found.bytes_per_step) == (1, 4_000_000)


def test_nobody_is_late_in_an_even_job():
    found = found_in(even(10, 3))
    assert not found.slowest_counts
    assert all(step.slowest is None for step in found.steps)
    assert found.awaited_collectives[0].spread == 0


@settings(max_examples=examples(20), deadline=None)
@given(hidden=st.integers(0, 2000), backward=st.integers(100, 9000))
def test_overlap_achieved_and_possible(hidden, backward):
    """A reduction of 2 ms, of which the program waits for what is not hidden."""
    job = even(5, 2, before=1 - backward / 10_000)
    recordings = job.recordings()
    for recording in recordings:
        for wait in recording.waits:
            wait.began += job.agreeing + hidden
    found = analyse(align(recordings))
    assert found.overlap_achieved == pytest.approx(hidden / 2000, abs=0.01)
    expected = max(hidden / 2000, min(1.0, backward / 2000))
    assert found.overlap_possible == pytest.approx(expected, abs=0.01)


def test_long_steps_are_set_apart_with_what_was_long_in_them():
    compute = [[10_000.0, 10_000.0] for _ in range(60)]
    reduction = [1000.0] * 60
    compute[2] = [500_000.0, 500_000.0]  # a warm-up
    compute[17] = [10_000.0, 310_000.0]
    compute[27] = [10_000.0, 310_000.0]
    compute[37] = [200_000.0, 210_000.0]
    reduction[47] = 90_000.0
    found = found_in(MadeJob(compute, reduction))
    assert (len(found.steps), found.long_steps.numbers) == (55, [17, 27, 37, 47])
    assert found.long_steps.warm_up == 1
    late, all_ranks, exchange = Where.ONE_RANK, Where.ALL_RANKS, Where.EXCHANGE
    assert [each.where for each in found.long_steps.steps] == [late, late, all_ranks, exchange]
    assert [each.last for each in found.long_steps.steps[:3]] == [1, 1, 1]
    assert found.long_steps.period == 10
    assert found.long_steps.excess(of_cores=False) == pytest.approx(889_000)
    assert found.overall("wait") == 0
    assert found.run_time == pytest.approx(55 * 11_050 + 4 * 11_050 + 889_000)


def test_a_single_long_step_is_noted():
    compute = [[10_000.0, 10_000.0] for _ in range(20)]
    compute[7] = [500_000.0, 10_000.0]
    found = found_in(MadeJob(compute, [1000.0] * 20))
    assert "Step 7 of 20 steps was long, 490 ms more than the others" in found.notes[0]


def test_one_file_tells_of_the_others_by_its_ticks():
    job = with_slow_rank(10, 3, slow=1)
    events = job.events(0)
    for number, (_, ready, _, _) in enumerate(job.times(1)):
        zero = job.first - 5000
        for rank, time in ((0, job.times(0)[number][1]), (1, ready), (2, job.times(2)[number][1])):
            tick = {"ph": "X", "name": str(rank), "dur": 0, "ts": time - zero, "pid": 1}
            events.append(tick | {"args": {"number": number}})
    found = analyse(align([interpret(events)]))
    assert found.slowest_counts == Counter({1: 10})
    assert found.share(0, "wait") == pytest.approx(5000 / 17_050, abs=1e-3)
    assert found.missing_ranks == [1, 2]
    assert "rank 1, 2 are not here" in found.notes[0]


def test_programs_without_our_optimizers_are_split_at_what_repeats():
    job = even(10, 2)
    plain = [
        [e for e in job.events(r) if e.get("name") not in ("STEP", "BACKWARD")] for r in (0, 1)
    ]
    found = analyse(align([interpret(events) for events in plain]))
    assert found.steps_from == f"repetitions of {ROW}"
    assert len(found.steps) == 9
    assert found.step_time == pytest.approx(12_050)
    assert found.overlap_possible is None


def test_an_empty_recording_and_one_without_steps():
    first = even(3, 2).events(0)[:4]
    found = analyse([interpret(first)])
    assert not found.steps
    assert not advise(found)
    assert "No steps" in verdict(found)


# -- sets of time ----------------------------------------------------------------------------

STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=15)


def moments(stretches) -> set[int]:
    return {moment for began, ended in stretches for moment in range(int(began), int(ended))}


@given(STRETCHES, STRETCHES, st.integers(0, 60), st.integers(0, 60))
def test_sets_of_time(one, other, began, ended):
    left, right = splitting.union(one), splitting.union(other)
    assert moments(left) == moments(one)
    assert all(a[1] < b[0] for a, b in pairwise(left))
    assert moments(splitting.intersection(left, right)) == moments(left) & moments(right)
    assert moments(splitting.difference(left, right)) == moments(left) - moments(right)
    assert moments(splitting.clip(left, began, ended)) == moments(left) & set(range(began, ended))
    assert splitting.length(left) == len(moments(left))


def test_what_is_reduced_while_a_rank_is_still_missing_elsewhere_is_hidden_by_its_delay():
    """Two buckets: the first runs while rank 1 still computes the gradients of the second."""
    first, second = with_slow_rank(5, 2, slow=1), with_slow_rank(5, 2, slow=1)
    recordings = []
    for rank in range(2):
        one, other = first.recordings()[rank], second.recordings()[rank]
        for early in other.collectives:
            early.name, early.key = "allreduce.early", (0, early.key[1], "allreduce.early")
        late = {c.key[1]: c for c in one.collectives}
        for early in other.collectives:  # both ranks run it 1 ms after the first is ready
            moment = first.times(0)[early.key[1]][1] - (first.first - 5000) + 1000
            early.submitted, early.agreed, early.started = moment - 10, moment, moment
            early.ended = moment + 1000
            assert late[early.key[1]].agreed > early.ended
        one.collectives += other.collectives
        recordings.append(one)
    found = analyse(align(recordings))
    assert found.mean(0, "wait") == pytest.approx(5000, abs=5)
    assert found.mean(0, "reduction") == pytest.approx(2000, abs=5)
    assert found.mean(0, "hidden") == pytest.approx(1000, abs=5)
