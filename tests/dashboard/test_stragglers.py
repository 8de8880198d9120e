"""Who holds the others up, and why."""

from __future__ import annotations

import re

import pytest

from horovod.runner.dashboard.reports import parse_report
from horovod.runner.dashboard.stragglers import RankView, find_stragglers
from tests.dashboard.simulated import SimulatedJob


def views(job: SimulatedJob, **more: dict[int, object]) -> dict[int, RankView]:
    found = {}
    for rank in range(job.size):
        report = parse_report(0, rank, job.encoded(rank))
        fields = {name: values[rank] for name, values in more.items() if rank in values}
        defaults = {"silent": 0.2, "process_state": "S"}
        found[rank] = RankView(job.host(rank), report.steps[-10:], **{**defaults, **fields})
    return found


def kinds(found) -> dict[int, str]:
    return {rank: finding.kind for rank, finding in found.items()}


@pytest.mark.parametrize("size", [2, 3, 8, 256])
def test_ranks_that_are_alike_are_fine(size: int):
    job = SimulatedJob(size)
    job.run(10)
    assert find_stragglers(views(job), 1.0) == {}


@pytest.mark.parametrize("size", [2, 3, 256])
def test_late_in_backward(size: int):
    job = SimulatedJob(size)
    job.slow = {1: 0.04}
    job.run(10)
    found = find_stragglers(views(job), 1.0)
    assert kinds(found) == {1: "backward"}
    assert re.fullmatch(
        r"late in backward: computes (8|9)\d ms a step, others (4|5)\d ms", found[1].text
    )


def test_late_elsewhere_is_told_apart():
    job = SimulatedJob(3)
    job.slow_input = {2: 0.04}
    job.run(10)
    found = find_stragglers(views(job), 1.0)
    assert kinds(found) == {2: "compute"}
    assert "late before backward (input, forward)" in found[2].text


def test_a_slow_link_of_a_rank_and_of_a_host():
    job = SimulatedJob(8, per_host=4)
    job.slow_link = {5: 0.05}
    job.run(10)
    found = find_stragglers(views(job), 1.0)
    assert kinds(found) == {5: "link"}
    assert found[5].text.startswith("slow link: ")
    job.slow_link = dict.fromkeys(range(4, 8), 0.05)
    job.run(60)
    found = find_stragglers(views(job), 1.0)
    assert kinds(found) == dict.fromkeys(range(4, 8), "link")
    assert found[5].text.startswith("slow link of node01: ")


def test_several_at_once():
    job = SimulatedJob(6)
    job.slow = {1: 0.05, 4: 0.08}
    job.run(10)
    assert kinds(find_stragglers(views(job), 1.0)) == {1: "backward", 4: "backward"}


def test_stopped_is_seen_before_the_rank_is_silent():
    job = SimulatedJob(3)
    job.run(10)
    found = find_stragglers(views(job, process_state={1: "T"}, waiting={1: 2}, awaited={1: 2.5}), 1)
    assert kinds(found) == {1: "stopped"}
    assert found[1].text == "stopped by a signal (state T); 2 ranks have waited 2.5 s for it"


def test_a_rank_of_another_host_is_silent():
    job = SimulatedJob(3)
    job.run(10)
    found = find_stragglers(views(job, process_state={1: ""}, silent={1: 12.0}), 1.0)
    assert kinds(found) == {1: "silent"}
    assert "no report for 12 s" in found[1].text
    # As long as reports are rare anyway nobody is suspected.
    assert find_stragglers(views(job, silent={1: 12.0}), 10.0) == {}


def test_a_rank_that_others_wait_for():
    job = SimulatedJob(3)
    job.run(10)
    found = find_stragglers(views(job, waiting={2: 1}, awaited={2: 1.5}), 1.0)
    assert kinds(found) == {2: "awaited"}
    assert found[2].text == "late in this step: 1 rank has waited 1.5 s for it"


def test_too_few_steps_say_nothing():
    job = SimulatedJob(3)
    job.slow = {1: 1.0}
    job.run(2)
    assert find_stragglers(views(job), 1.0) == {}
    assert find_stragglers({}, 1.0) == {}


def test_noise_of_short_steps_is_no_straggler():
    job = SimulatedJob(3, compute=0.0005)
    job.slow = {1: 0.001}
    job.run(10)
    assert find_stragglers(views(job), 1.0) == {}
