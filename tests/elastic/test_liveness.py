"""Who answers a decision, and what follows for those who do not; without processes or clocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod.runner.elastic.job_state import Limits
from tests.elastic.parts import Parts, parts

LIMITS = Limits(num_proc=3, min_np=2, elastic_timeout=600.0, answer_timeout=30.0)
ABSENCE = 5.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Parts]:
    """Three workers, two of them on one host, that have got the first decision."""
    with parts(tmp_path, {"a": 2, "b": 1}, LIMITS, max_failures=10) as job:
        job.start("a", "a", "b")
        job.liveness.begin(job.decide(0, 1, 2))
        yield job


def test_who_does_not_hear_of_a_decision_is_given_up(job: Parts):
    job.state.alive[0].heard = job.state.alive[2].heard = 1
    job.run_timer(LIMITS.answer_timeout)
    assert list(job.state.alive) == [0, 2]
    assert job.hosts.stopped == [("a", 1)]
    assert job.state.causes == ["w1 (rank 1, a) failed: did not react within 30 s"]
    assert job.reconciled == 1


def test_nobody_is_disturbed_if_all_have_heard(job: Parts):
    for process in job.state.alive.values():
        process.heard = 1
    job.run_timer(LIMITS.answer_timeout)
    assert (len(job.state.alive), job.reconciled) == (3, 0)


def test_who_hears_but_does_not_come_is_given_up_later(job: Parts):
    for process in job.state.alive.values():
        process.heard = 1
    job.state.alive[0].entered = job.state.alive[1].entered = (1, 0)
    job.run_timer(LIMITS.elastic_timeout)
    assert list(job.state.alive) == [0, 1]
    assert "did not come back to training within 600 s" in job.state.causes[0]


@pytest.mark.parametrize("kind", ["added", "removed", "mixed"])
def test_after_a_change_of_hosts_workers_may_come_when_they_like(job: Parts, kind: str):
    job.timers.clear()
    job.liveness.begin(job.decide(0, 1, kind=kind))
    job.run_timer(LIMITS.elastic_timeout)
    assert len(job.state.alive) == 3


def test_later_decisions_give_a_worker_that_hangs_no_more_time(job: Parts):
    job.decide(0, 1, 2, kind="failure")
    job.state.alive[0].entered, job.state.alive[1].entered = (1, 0), (2, 0)
    job.run_timer(LIMITS.elastic_timeout)
    assert list(job.state.alive) == [0, 1]


def test_nobody_is_given_up_while_all_wait_for_others(job: Parts):
    job.decide(0, 1, 2, kind="failure", min_np=4)
    job.run_timer(LIMITS.elastic_timeout)
    assert len(job.state.alive) == 3
    job.decide(0, 1, 2, kind="failure")
    job.state.alive[0].entered = job.state.alive[2].entered = (3, 0)
    job.run_timer(LIMITS.elastic_timeout)
    assert list(job.state.alive) == [0, 2]


def test_workers_that_wait_for_more_are_not_expected_to_meet(job: Parts):
    job.timers.clear()
    job.liveness.begin(job.decide(0, 1, kind="failure", min_np=3))
    job.run_timer(LIMITS.elastic_timeout)
    assert len(job.state.alive) == 3


def test_who_meets_again_while_another_is_missing_calls_all(job: Parts):
    for process in job.state.alive.values():
        process.entered = (1, 0)
    job.state.alive[0].entered = job.state.alive[1].entered = (1, 1)
    job.liveness.note_entry(1, 1)
    assert not job.state.decision_requested, "the other may be on its way"
    job.run_timer(ABSENCE)
    assert job.state.decision_requested
    assert job.state.causes == ["the others have lost w2 (rank 2, b)"]
    assert job.reconciled == 1
    job.liveness.begin(job.decide(0, 1, 2, kind="failure"))
    assert not job.state.decision_requested


def test_who_meets_again_together_needs_nobody(job: Parts):
    for process in job.state.alive.values():
        process.entered = (1, 1)
    job.liveness.note_entry(1, 1)
    job.run_timer(ABSENCE)
    assert (job.state.decision_requested, job.reconciled) == (False, 0)


def test_the_first_meeting_and_old_news_are_nothing_to_mind(job: Parts):
    job.timers.clear()
    job.liveness.note_entry(1, 0)
    job.liveness.note_entry(0, 3)
    assert job.timers == []
    assert not job.state.decision_requested


def test_nobody_waits_for_a_worker_that_has_finished(job: Parts):
    job.state.alive[0].entered = (1, 0)
    job.liveness.note_finish()
    assert job.state.decision_requested


def test_a_generation_that_has_met_does_not_miss_who_has_finished(job: Parts):
    job.state.mark_formed(job.state.number)
    job.state.alive[0].entered = (1, 0)
    job.liveness.note_finish()
    assert not job.state.decision_requested
    # But if the others meet again, that one will not come.
    job.state.finished_workers.append(1)
    job.liveness.note_entry(1, 1)
    assert job.state.decision_requested
