"""What each piece of advice says: made-up jobs whose answers are known. How often: test_faults."""

from __future__ import annotations

import pytest

from horovod.observe.reports.advice import advise, verdict
from horovod.observe.reports.analysis import Analysis, analyse
from horovod.observe.reports.losses import Advice, Fault
from horovod.observe.timeline.clocks import align
from horovod.observe.timeline.recording import RecordedCollective, TimeSpan, interpret
from tests.observe.reports.faults import JOBS
from tests.observe.reports.simulated import SimulatedJob
from tests.observe.timeline.made import MadeJob, with_slow_rank


def found_in(job: MadeJob | SimulatedJob) -> Analysis:
    return analyse(align(job.recordings()))


def first_about(job: MadeJob | SimulatedJob) -> Advice:
    return advise(found_in(job))[0]


def subjects(job: MadeJob | SimulatedJob) -> list[str]:
    return [each.subject for each in advise(found_in(job))]


def test_no_microsecond_is_lost_or_counted_twice():
    """What a step loses, and computing, are the step: in all kinds of jobs."""
    for name, make in JOBS.items():
        losses = found_in(make(3, 4)[0]).losses
        parts = losses.computing + losses.turns + losses.cores + losses.exchange
        parts += losses.slow_ranks.cost if losses.slow_ranks is not None else 0.0
        assert parts == pytest.approx(losses.step, rel=0.02), name


def test_a_slow_rank_comes_first_with_its_numbers_and_the_place_to_look():
    first = first_about(with_slow_rank(20, 3, slow=2, hosts=["a", "a", "b"]))
    assert first.subject == "rank 2 is slow"
    assert "it is the last in 20 of 20 steps" in first.number
    assert "Rank 2 (host b) computes 5.0 ms (median) longer than the others" in first.number
    assert "9.0 ms until the first gradient, on the others 6.0 ms" in first.action
    assert first.cost == pytest.approx(20 * 5000)


def test_a_rank_that_is_slow_in_backward():
    job = with_slow_rank(20, 2, slow=1)
    recordings = [interpret(job.events(0))]
    job.before = 0.4  # 6 ms before and 9 ms in backward, against 6 and 4
    recordings.append(interpret(job.events(1)))
    first = advise(analyse(align(recordings)))[0]
    assert "Backward takes 9.0 ms, on the others 4.0 ms" in first.action


def test_a_rank_that_waits_for_data_is_told_from_one_that_computes():
    job = SimulatedJob(1, 2, slow_input={1: 5000.0})
    assert "it does not run: it waits for something" in first_about(job).action
    job = SimulatedJob(1, 2, slow_backward={1: 5000.0})
    assert "does not run" not in first_about(job).action


def test_ranks_that_are_late_in_turn():
    compute = [[10_000.0 + 5000 * (step % 3 == rank) for rank in range(3)] for step in range(21)]
    first = first_about(MadeJob(compute, [100.0] * 21))
    assert first.subject == "ranks are late in turn"
    assert "no rank is the last in more than 7 of 21 steps" in first.number
    assert first.cost == pytest.approx(21 * 5000)


def test_exchanges_between_hosts_call_for_overlap_compression_and_larger_batches():
    job = MadeJob(
        [[10_000.0] * 2] * 10, [8000.0] * 10, hosts=["a", "b"], transport="TCP", nbytes=8_000_000
    )
    (only,) = advise(found_in(job))
    assert only.fault is Fault.EXCHANGE
    assert "7.6 MiB a step (994 MB/s)" in only.number
    assert "8.1 ms of each step, 45 %" in only.number
    for words in ("overlap_forward=model", "long enough for 50 %", "bf16", "larger batches"):
        assert words in only.action
    assert only.cost == pytest.approx(10 * 8050)


def test_inside_one_host_nobody_is_told_to_compress():
    (only,) = advise(found_in(MadeJob([[10_000.0] * 2] * 10, [8000.0] * 10)))
    assert only.fault is Fault.EXCHANGE
    assert "bf16" not in only.action
    assert "HOROVOD_OVERLAP_BACKWARD=1" in only.action


def test_devices_are_not_told_of_cores_or_hosts():
    job = SimulatedJob(1, 2, on_devices=True, transport="NCCL", reduction=6000.0, before=1450.0)
    (only,) = advise(found_in(job))
    assert only.fault is Fault.EXCHANGE
    assert "overlap_forward=model" in only.action
    assert "core" not in only.action


def test_a_device_that_waits_inside_of_a_reduction_waits_for_the_late_rank():
    job = SimulatedJob(1, 2, on_devices=True, transport="NCCL", slow_backward={1: 5000.0})
    found = found_in(job)
    assert found.mean(0, "wait") > 4000
    assert found.mean(0, "reduction") == pytest.approx(found.mean(1, "reduction"), rel=0.1)


def test_agreeing_takes_long():
    job = MadeJob([[10_000.0] * 2] * 10, [500.0] * 10, agreeing=4000.0)
    (only,) = advise(found_in(job))
    assert only.fault is Fault.NEGOTIATION
    assert "agreeing on 1.0 collectives takes 4.0 ms of each step, 28 %" in only.number
    assert "HOROVOD_CYCLE_TIME" in only.action


def test_operations_are_counted_and_not_buckets():
    job = SimulatedJob(1, 2, operations=120, reduction=11_000.0, nbytes=17_000, fusion_threshold=0)
    found = found_in(job)
    assert found.collectives_per_step == 1
    assert found.operations_per_step == 120
    first = advise(found)[0]
    assert first.fault is Fault.SMALL_OPERATIONS
    assert first.number.startswith("120 operations in each step, of 142 B on average, take 11.")
    assert "for 16.6 KiB (1.5 MB/s)" in first.number
    assert "HOROVOD_FUSION_THRESHOLD is 0" in first.action


def test_collectives_that_are_fused_and_upstreams_that_overlap_are_one_operation():
    def rows(*phases: tuple[float, float]) -> list[RecordedCollective]:
        made = []
        for index, (began, ended) in enumerate(phases):
            each = RecordedCollective(f"t{index}", "ALLREDUCE", (0, index, "t"), began)
            each.phases = [TimeSpan(began, ended, what="GLOO_ALLREDUCE")]
            made.append(each)
        made[0].phases.append(TimeSpan(0.0, 1.0, what="MEMCPY_IN_FUSION_BUFFER"))
        return made

    job = SimulatedJob(1, 2, steps=6)
    recordings = job.recordings()
    step = recordings[0].steps["DistributedOptimizer.0"][2]
    recordings[0].collectives = rows(
        (step.began + 5, step.began + 9), (step.began + 6, step.began + 10)
    ) + rows((step.began + 10, step.began + 11))
    found = analyse(recordings)
    assert found.operations_per_step == pytest.approx(2 / len(found.steps))


def test_cores_that_are_too_few_are_told_from_cores_that_are_busy():
    few = first_about(SimulatedJob(1, 4, cores=2, starving=1.0))
    assert few.subject == "cores are oversubscribed"
    assert "4 ranks share 2 cores" in few.number
    busy = first_about(SimulatedJob(1, 4, starving=1.0))
    assert busy.subject == "cores are busy with something else"
    assert "4 ranks may use 5 cores" in busy.number


def test_without_cores_nobody_is_told_to_load_data_faster():
    """With several threads in a rank, the one that trains waits for those that have no core."""
    waits = dict.fromkeys(range(2), 5000.0)
    starved = SimulatedJob(1, 2, starving=1.0, slow_input=waits)
    assert [each.fault for each in advise(found_in(starved))] == [Fault.CORES]
    starved = SimulatedJob(1, 2, starving=1.0, slow_loading=20_000.0)
    assert [each.fault for each in advise(found_in(starved))] == [Fault.CORES]
    fed = SimulatedJob(1, 2, slow_input=waits)
    assert [each.fault for each in advise(found_in(fed))] == [Fault.INPUT]


def test_long_steps_tell_when_who_and_what_they_cost():
    pauses = {number: {1: 300_000.0} for number in range(10, 80, 10)}
    found = found_in(SimulatedJob(1, 2, steps=79, pauses=pauses))
    first = advise(found)[0]
    assert first.fault is Fault.LONG_STEPS
    assert "7 of 78 steps, every 10th step, take 307 ms (median) instead of 7." in first.number
    assert "Rank 1 is the last in 7 of them" in first.number
    assert first.cost == pytest.approx(7 * 300_000, rel=0.02)
    assert "Long steps take 78 % of the run" in verdict(found)


def test_long_steps_of_one_rank_after_another_blame_no_rank():
    pauses = {number: {number % 4: 300_000.0} for number in range(7, 80, 9)}
    first = first_about(SimulatedJob(1, 4, steps=79, pauses=pauses))
    assert first.fault is Fault.LONG_STEPS
    assert "every 9th step" in first.number
    assert "Now one rank is the last in them, now another" in first.number
    assert "each at another time" in first.action


def test_long_steps_for_lack_of_a_core_are_counted_there():
    pauses = {number: {1: 60_000.0} for number in (20, 31, 50)}
    recordings = SimulatedJob(1, 2, steps=60, pauses=pauses).recordings()
    for step in recordings[1].steps["DistributedOptimizer.0"]:
        if step.number in pauses:
            step.starved = 60_000.0
    (only,) = advise(analyse(recordings))
    assert only.fault is Fault.CORES
    assert only.cost == pytest.approx(3 * 60_000, rel=0.1)


def test_a_job_that_only_computes_is_told_so():
    found = found_in(MadeJob([[100_000.0] * 2] * 10, [500.0] * 10))
    assert not advise(found)
    assert "nothing left to gain" in verdict(found)


def test_a_few_steps_are_reported_without_a_guess_who_is_slow():
    assert "rank 1 is slow" not in subjects(with_slow_rank(5, 2))
