"""What is noted and said about lost workers and hosts, without processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.elastic.job_state import Limits
from tests.elastic.parts import Parts, parts


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Parts]:
    with parts(tmp_path, {"a": 2, "b": 1}, Limits(num_proc=3, min_np=2), max_failures=2) as job:
        job.start("a", "a", "b")
        job.decide(0, 1, 2)
        yield job


class DeadLink:
    """The connection to the agent of another machine, which ended."""

    remote = True
    own_variables = ()
    pid = 0
    unsent = False

    def announce_agent(self, length: int) -> None: ...

    def write(self, data: memoryview) -> int:
        return len(data)

    def flush(self) -> None: ...


def test_a_failure_is_noted_everywhere(job: Parts):
    job.failures.failed(job.state.alive[1], 3)
    assert job.state.failed_workers == [1]
    assert job.state.causes == ["w1 (rank 1, a) failed: exit code 3"]
    (event,) = job.events()
    del event["time"]
    assert event == {"event": "failed", "worker": "w1", "host": "a", "how": "exit code 3"}
    assert job.manager.blacklisting.failures("a") == 1
    assert not job.manager.is_blacklisted("a")


def test_a_failure_is_said_at_once_if_no_decision_may_follow(job: Parts):
    job.state.finishing = True
    job.failures.failed(job.state.alive[1], 3)
    (event,) = job.events()
    assert event["message"] == "w1 (rank 1, a) failed: exit code 3; others have finished"
    job.state.alive[0].is_done = True
    job.failures.failed(job.state.alive[0], 3)
    assert "message" not in job.events()[1]  # the end of the job tells of it


def test_the_ranks_that_a_worker_blamed_are_in_the_status_file(job: Parts):
    job.state.alive[0].because_of = (1, 2)
    job.failures.failed(job.state.alive[0], 1)
    assert job.events()[0]["because_of"] == [1, 2]


def test_a_host_is_blacklisted_after_its_last_allowed_failure(job: Parts):
    job.failures.failed(job.state.alive[0], -signal.SIGSEGV)
    job.failures.failed(job.state.alive[1], 1)
    assert job.manager.is_blacklisted("a")
    assert not job.manager.is_blacklisted("b")
    assert job.events()[-1]["message"] == "a gets no new workers after 2 failures"


def test_a_worker_that_could_not_be_started_says_why(job: Parts):
    (process,) = job.start("b")
    process.pid = 0
    job.failures.could_not_start(process, "python: no such file")
    assert process.number not in job.state.alive
    assert job.state.failed_workers == [], "it had no place"
    assert job.state.host_problem == "cannot start a worker on b: python: no such file"
    assert job.events()[-1]["event"] == "host failed"


def test_who_is_given_up_is_killed(job: Parts):
    job.failures.give_up(job.state.alive[2], "did not react within 30 s")
    assert job.hosts.stopped == [("b", 2)]
    assert job.state.last_failure is not None
    assert job.state.last_failure.code == -signal.SIGKILL
    assert job.state.fenced_until == 0.0


def test_where_killing_is_not_certain_nobody_begins_before_the_worker_has_ended_itself(job: Parts):
    job.hosts.disobedient.add("b")
    job.failures.give_up(job.state.alive[2], "did not react within 30 s")
    assert job.state.fenced_until > time.monotonic()


def test_with_a_host_its_workers_are_lost_and_those_told_to_end_are_not_missed(job: Parts):
    job.state.alive[0].is_dismissed = True
    agent = HostAgent("a", link=DeadLink())  # type: ignore[arg-type]
    agent.hello = {"pid": 1}
    job.failures.lost_host(agent, "ssh: reset")
    assert list(job.state.alive) == [2]
    assert job.state.failed_workers == [1]
    assert job.state.causes == ["w1 (rank 1, a) failed: lost with its host"]
    assert job.state.last_failure is not None
    assert job.state.last_failure.describe() == "lost with its host"
    assert job.state.host_problem == "the connection to a is lost: ssh: reset"
    assert job.state.fenced_until > time.monotonic(), "they may still run there"
    assert job.manager.blacklisting.failures("a") == 1, "one failure, however many workers"


def test_the_status_file_is_whole_lines(job: Parts, tmp_path: Path):
    job.failures.failed(job.state.alive[1], 3)
    job.failures.blame("a", "it burns")
    text = (tmp_path / "events").read_text()
    assert text.endswith("\n")
    assert [event["event"] for event in job.events()] == ["failed", "host failed", "blacklisted"]
    assert "it burns" in (tmp_path / "console").read_text()
    assert os.fspath(tmp_path) not in text
