"""When an elastic job is over, and with which words; without processes or clocks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horovod.runner.elastic.policy import Limits
from horovod.runner.elastic.termination import Ending
from horovod.runner.report import Exit
from tests.elastic.parts import Parts, parts

LIMITS = Limits(num_proc=2, min_np=2, reset_limit=3, elastic_timeout=600.0)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Parts]:
    """Two workers that train."""
    with parts(tmp_path, {"a": 1, "b": 1}, LIMITS) as job:
        job.termination.discovered = True
        job.start("a", "b")
        job.decide(0, 1)
        job.termination.formed()
        yield job


def finish(job: Parts, worker: int) -> None:
    process = job.roster.alive[worker]
    job.termination.finished(process.exit(0))
    job.roster.remove(process)
    job.roster.finished.append(worker)


def lose(job: Parts, worker: int, code: int) -> None:
    job.failures.failed(job.roster.alive[worker], code)


def find(job: Parts, now: float = 0.0, **details: object) -> Ending:
    ending = job.termination.find(job.view(now, **details))
    assert ending is not None
    return ending


# -- well ----------------------------------------------------------------------------------------


def test_a_job_that_trains_goes_on(job: Parts):
    assert job.termination.find(job.view(1e9)) is None


def test_it_is_over_when_all_have_finished(job: Parts):
    finish(job, 0)
    assert job.termination.find(job.view(finishing=True)) is None
    finish(job, 1)
    assert find(job) == Ending()


def test_workers_that_were_told_to_end_are_not_waited_for(job: Parts):
    finish(job, 0)
    job.roster.alive[1].dismissed = True
    assert find(job) == Ending()


def test_a_failure_after_which_somebody_finished_is_forgiven(job: Parts):
    lose(job, 1, -signal.SIGKILL)
    finish(job, 0)
    assert find(job) == Ending()


def test_one_after_which_nobody_did_is_not(job: Parts):
    finish(job, 0)
    lose(job, 1, 3)
    ending = find(job, finishing=True)
    assert ending.failure is not None
    assert ending.failure.exit.code == 3


def test_a_worker_that_fails_after_its_training_returned_fails_the_job(job: Parts):
    job.roster.alive[1].done = True
    lose(job, 1, 7)
    finish(job, 0)
    ending = find(job)
    assert ending.failure is not None
    assert ending.failure.exit.code == 7


# -- badly ---------------------------------------------------------------------------------------


def test_when_all_fail_by_themselves_the_cause_is_told_and_not_those_who_followed(job: Parts):
    job.roster.alive[0].because_of = (1,)
    lose(job, 0, 1)
    lose(job, 1, 5)
    ending = find(job)
    assert ending.failure is not None
    assert ending.failure.exit.code == 5
    job.termination.settle(ending)
    outcome = job.termination.outcome
    assert outcome.first_failure == ending.failure.exit
    assert [exit.rank for exit in outcome.exits] == [0, 1]
    assert job.termination.blamed == ending.failure


def test_who_left_early_is_named_when_others_failed_because_of_it(job: Parts):
    job.roster.alive[1].because_of = (0,)
    finish(job, 0)
    lose(job, 1, 1)
    job.termination.settle(find(job))
    assert job.termination.outcome.gone_early == [Exit(0, 1 << 30, 0, "a")]


def test_workers_killed_with_their_hosts_are_tried_again_twice(tmp_path: Path):
    with parts(tmp_path, {"a": 1, "b": 1}, LIMITS, max_failures=100) as job:
        for attempt in range(2):
            for process in job.start("a", "b"):
                job.decide(*job.roster.alive)
                job.failures.failed(process, -signal.SIGKILL)
            ending = job.termination.find(job.view())
            assert (ending is None) == (attempt == 0)
        assert ending is not None
        assert ending.problem == "all workers were lost again before they could begin"


def test_meeting_in_between_starts_the_count_again(tmp_path: Path):
    with parts(tmp_path, {"a": 1, "b": 1}, LIMITS, max_failures=100) as job:
        for _ in range(5):
            processes = job.start("a", "b")
            job.decide(*job.roster.alive)
            job.termination.formed()
            for process in processes:
                job.failures.failed(process, -signal.SIGKILL)
            assert job.termination.find(job.view()) is None


def test_when_none_could_be_started_the_host_says_why(tmp_path: Path):
    with parts(tmp_path, {"a": 1}, LIMITS) as job:
        (process,) = job.start("a")
        process.pid = 0
        job.failures.could_not_start(process, "python: no such file")
        assert find(job) == Ending("cannot start a worker on a: python: no such file", status=127)


def test_every_host_blacklisted(job: Parts):
    for worker in (0, 1):
        lose(job, worker, -signal.SIGKILL)
    ending = find(job)
    assert ending.problem.startswith("every host has failed too often (--max-worker-failures)")
    assert "the last: rank 1 on b, killed by SIGKILL" in ending.problem


def test_all_have_left_as_they_were_told_to(job: Parts):
    for worker, host in enumerate("ab"):
        job.roster.remove(job.roster.alive[worker])
        job.manager.give_back(host)
    assert find(job) == Ending("all workers have left, as they were told to", status=143)


def test_the_reset_limit_names_itself_and_the_last_failure(job: Parts):
    lose(job, 1, 1)
    ending = job.termination.exhausted()
    assert "exceeded limit: 3 (--reset-limit)" in ending.problem
    assert ending.failure == job.roster.last_failure


# -- too few -------------------------------------------------------------------------------------


def test_too_few_workers_are_waited_for_as_long_as_the_timeout_and_not_longer(job: Parts):
    lose(job, 1, -signal.SIGKILL)
    assert job.termination.find(job.view(100.0)) is None
    assert job.termination.find(job.view(699.9)) is None
    ending = find(job, 700.0)
    assert ending.problem == (
        "gave up after 600 s (--elastic-timeout): the job needs 2 workers, and 1 is left "
        "(a:1; not used after failures: b)"
    )


def test_the_wait_begins_anew_each_time(job: Parts):
    lose(job, 1, -signal.SIGKILL)
    assert job.termination.find(job.view(100.0)) is None
    job.manager.take({"a": 1, "b": 1, "c": 1})
    job.start("c")
    job.decide(0, 2)
    assert job.termination.find(job.view(650.0)) is None
    lose(job, 2, -signal.SIGKILL)
    assert job.termination.find(job.view(1000.0)) is None
    assert job.termination.find(job.view(1599.0)) is None
    assert find(job, 1600.0).problem


def test_what_is_waited_for_is_said_once_and_forgotten_when_it_has_come(job: Parts):
    lose(job, 1, -signal.SIGKILL)
    assert job.termination.find(job.view(100.0)) is None
    said = job.termination.waiting_for(job.view(100.0))
    assert said == (
        "waiting up to 600 s for hosts: the job needs 2 workers, and 1 is left "
        "(a:1; not used after failures: b)"
    )
    assert job.termination.waiting_for(job.view(101.0)) == ""
    assert job.termination.lacking == said
    job.manager.take({"a": 1, "b": 1, "c": 1})
    assert job.termination.waiting_for(job.view(102.0)) == ""
    assert job.termination.lacking == ""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=20))
def test_a_job_with_enough_workers_never_ends_by_the_clock(job: Parts, times: list[float]):
    for now in sorted(times):
        assert job.termination.find(job.view(now)) is None
