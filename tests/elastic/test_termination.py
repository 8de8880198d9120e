"""When an elastic job is over, and with which words: views in, endings out."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.common.generations.decisions import DRIVER_LOST
from horovod.runner.elastic import policy
from horovod.runner.elastic.job_state import JobState, Limits, Process
from horovod.runner.elastic.termination import (
    Ending,
    are_all_lost,
    describe_shortage,
    find_ending,
    shortage_start,
)
from horovod.runner.output.report import Exit
from tests.elastic.parts import Parts, moment, parts

LIMITS = Limits(num_proc=2, min_np=2, reset_limit=3, elastic_timeout=600.0)
TRAINING = moment(
    now=100.0,
    number=1,
    is_formed=True,
    have_met=True,
    hosts={"a": 1, "b": 1},
    workers=[Process(0, "a", joined=1, seat=0), Process(1, "b", joined=1, seat=1)],
)

ENDED = {0: Exit(rank=0, pid=7, code=0, host="a")}


def view(**details: object) -> JobState:
    """Two workers that train, but for these details."""
    return moment(TRAINING, **details)


def failure(worker: int, code: int, *, pid: int = 7, because_of: tuple[int, ...] | None = None):
    host = "ab"[worker % 2]
    return Exit(worker, pid, code, host, because_of, worker=worker)


def lost(*failures: Exit, **details: object) -> JobState:
    """Nobody is left."""
    last = failures[-1]
    facts = {"workers": [], "failures": list(failures), "last_failure": last}
    return view(**{**facts, **details})


def find(seen: JobState, limits: Limits = LIMITS) -> Ending:
    ending = find_ending(seen, limits)
    assert ending is not None
    assert policy.make_plan(seen, limits).ending == ending, "the plan has it"
    return ending


# -- well ----------------------------------------------------------------------------------------


@given(st.floats(0.0, 1e9), st.none() | st.floats(0.0, 1e9))
def test_a_job_with_enough_workers_never_ends_by_the_clock(now: float, since: float | None):
    seen = view(now=now, short_since=since)
    assert find_ending(seen, LIMITS) is None
    assert shortage_start(seen, LIMITS) is None


def test_it_is_over_when_all_have_finished():
    some = view(finishing=True, ended_well=ENDED, workers=TRAINING.workers[1:])
    assert find_ending(some, LIMITS) is None
    assert find(view(workers=[], ended_well=ENDED)) == Ending()


def test_a_failure_that_is_not_forgiven_is_the_end_of_those_who_finished():
    bad = failure(1, 7)
    ending = find(view(workers=[], ended_well=ENDED, unrecovered=bad))
    assert ending == Ending(failure=bad)


@pytest.mark.parametrize("ended", [{}, ENDED])
def test_who_fails_after_training_fails_the_job_and_is_named(ended: dict[int, Exit]):
    gone = dataclasses.replace(failure(1, -9), loss="lost with its host")
    seen = view(workers=[], finishing=True, ended_well=ended, bad_end=gone)
    assert find(seen) == Ending(
        "rank 1 on b had finished training, and then failed: lost with its host. What its script "
        "does after training may not have happened: check what it should have written",
        gone,
    )


@pytest.mark.parametrize("why", ["finishing", "interrupted"])
def test_near_the_end_nothing_but_the_last_exit_ends_the_job(why: str):
    seen = lost(failure(0, 1), failure(1, 1), **{why: True})
    assert find_ending(seen, LIMITS) is None
    assert not are_all_lost(seen)


# -- hosts ---------------------------------------------------------------------------------------


def test_without_hosts_there_is_no_job():
    died = failure(0, -9)
    seen = view(no_hosts="the cluster is gone", last_failure=died)
    assert find(seen) == Ending("the cluster is gone", died)
    assert find(view(no_hosts="gone", finishing=True)).problem == "gone"


def test_every_host_blacklisted():
    died = failure(1, -signal.SIGKILL)
    both = frozenset("ab")
    seen = view(
        workers=TRAINING.workers[:1],
        blacklisted=both,
        excluded_hosts=both,
        last_failure=died,
        failed_workers=[1],
    )
    assert find(seen) == Ending(
        "every host has failed too often (--max-worker-failures), and 1 is left; the last: rank 1 "
        "on b, killed by SIGKILL (exit code 137)",
        died,
    )
    assert find_ending(view(excluded_hosts=both, blacklisted=both), LIMITS) is None, (
        "enough are left"
    )
    one = moment(seen, excluded_hosts=frozenset("a"))
    assert find_ending(one, LIMITS) is None, "the other host may come back"
    unreachable = view(
        number=0, workers=[], blacklisted=both, excluded_hosts=both, host_problem="no route to b"
    )
    assert find(unreachable).problem.endswith("and 0 are left; the last: no route to b")


def test_all_have_left_as_they_were_told_to():
    seen = view(workers=[], hosts={"a": 0, "b": 0}, departed_workers=[0, 1])
    assert find(seen) == Ending("all workers have left, as they were told to", status=143)
    assert find_ending(moment(seen, number=0), LIMITS) is None, "they never came"


# -- all are lost --------------------------------------------------------------------------------


def test_when_all_fail_by_themselves_the_cause_is_told_and_not_those_who_followed():
    cause = failure(1, 5)
    assert find(lost(failure(0, 1, because_of=(1,)), cause)) == Ending(failure=cause)


def test_a_survivor_is_reason_enough_to_go_on():
    seen = lost(failure(0, 1), workers=TRAINING.workers[1:])
    assert not are_all_lost(seen)
    assert find_ending(seen, LIMITS) is None
    newcomer = [Process(2, "a")]
    assert are_all_lost(lost(failure(0, 1), workers=newcomer)), "it has nothing of the training"
    assert not are_all_lost(lost(failure(0, 1), workers=newcomer, number=0)), "nobody has"


@pytest.mark.parametrize("code", [-signal.SIGKILL, DRIVER_LOST])
def test_workers_lost_with_their_hosts_or_their_driver_are_tried_again_twice(code: int):
    killed = failure(0, code), failure(1, code)
    assert find_ending(lost(*killed), LIMITS) is None
    assert find_ending(lost(*killed, have_met=False), LIMITS) is None
    again = find(lost(*killed, have_met=False, fruitless_starts=1))
    assert again == Ending("all workers were lost again before they could begin", killed[0])
    assert find_ending(lost(*killed, fruitless_starts=1), LIMITS) is None, "they had begun"


def test_when_none_could_be_started_the_host_says_why():
    problem = "cannot start: no such file"
    seen = lost(failure(0, 127, pid=0), number=0, hosts={"a": 1}, host_problem=problem)
    assert find(seen) == Ending("cannot start: no such file", status=127)


def test_those_who_were_lost_do_not_hide_that_the_others_have_left():
    seen = lost(failure(0, -9), hosts={"a": 0, "b": 0})
    assert find(seen).problem == "all workers have left, as they were told to"


# -- too few -------------------------------------------------------------------------------------


def one_is_left(**details: object) -> JobState:
    return view(**{"workers": TRAINING.workers[:1], "blacklisted": frozenset("b"), **details})


def test_too_few_workers_are_waited_for_as_long_as_the_timeout_and_not_longer():
    seen = one_is_left()
    assert find_ending(seen, LIMITS) is None
    assert shortage_start(seen, LIMITS) == 100.0
    assert policy.make_plan(seen, LIMITS).short_since == 100.0
    waiting = one_is_left(now=699.9, short_since=100.0)
    assert find_ending(waiting, LIMITS) is None
    assert shortage_start(waiting, LIMITS) == 100.0
    assert find(one_is_left(now=700.0, short_since=100.0)).problem == (
        "gave up after 600 s (--elastic-timeout): the job needs 2 workers, and 1 is left "
        "(a:1; not used after failures: b)"
    )


def test_before_the_first_decision_only_those_who_wait_get_impatient():
    starting = view(number=0, workers=[Process(0, "a"), Process(1, "b")])
    assert shortage_start(starting, LIMITS) is None, "imports may take their time"
    one_ready = view(number=0, workers=[Process(0, "a", ready_at=1.0), Process(1, "b")])
    assert shortage_start(one_ready, LIMITS) == 100.0
    assert shortage_start(view(number=0, workers=[]), LIMITS) == 100.0
    problem = find(moment(one_ready, short_since=-500.0)).problem
    assert "the job needs 2 workers, and 0 are left (1 ready, 1 starting)" in problem


def test_what_is_waited_for():
    seen = one_is_left(short_since=100.0)
    assert describe_shortage(seen, LIMITS) == (
        "waiting up to 600 s for hosts: the job needs 2 workers, and 1 is left "
        "(a:1; not used after failures: b)"
    )
    assert describe_shortage(one_is_left(), LIMITS) == "", "it is not short yet"
    assert describe_shortage(moment(seen, blacklisted=frozenset()), LIMITS) == "", "only slow"
    assert describe_shortage(moment(seen, interrupted=True), LIMITS) == ""
    empty = moment(now=0.0, hosts={"a": 1}, short_since=0.0)
    assert describe_shortage(empty, LIMITS) == (
        "waiting up to 600 s for hosts: the job needs 2 slots to begin, and 1 is offered (a:1)"
    )
    assert describe_shortage(moment(empty, hosts_known=False), LIMITS) == ""


def test_a_cluster_without_room_is_waited_for_and_the_reason_is_told():
    full = view(number=0, workers=[Process(0, "a"), Process(1, "b")], obstacle="All CPUs are taken")
    assert shortage_start(full, LIMITS) == 100.0
    waiting = moment(full, short_since=100.0)
    assert find_ending(waiting, LIMITS) is None
    needs = "the job needs 2 workers, and 0 can begin. All CPUs are taken"
    assert describe_shortage(waiting, LIMITS) == f"waiting up to 600 s for room: {needs}"
    ending = find(moment(waiting, now=700.0))
    assert ending.problem == f"gave up after 600 s (--elastic-timeout): {needs}"
    one = moment(waiting, workers=[Process(0, "a", ready_at=1.0), Process(1, "b")])
    enough = dataclasses.replace(LIMITS, min_np=1)
    assert describe_shortage(one, enough).startswith(
        "waiting for room: the job needs 1 worker, and 1 can"
    )
    replacing = one_is_left(short_since=100.0, obstacle="All CPUs are taken")
    assert "the job needs 2 workers, and 1 is left. All" in describe_shortage(replacing, LIMITS)
    assert describe_shortage(view(obstacle="All CPUs are taken"), LIMITS) == "", "there are enough"


# -- with the state that the driver keeps --------------------------------------------------------


def look(job: Parts, now: float) -> policy.ElasticPlan:
    """What the driver does with a plan, as far as time and endings are concerned."""
    record, offered, state = job.manager.blacklisting, job.manager.current_hosts, job.state
    state.now, state.hosts, state.blacklisted = now, offered.host_slots, offered.blacklisted
    state.excluded_hosts = frozenset(filter(record.is_for_good, state.hosts))
    plan = policy.make_plan(state, job.limits)
    if plan.begin_anew:
        job.state.begin_anew()
    job.state.short_since = plan.short_since
    return plan


def test_the_wait_begins_anew_each_time(tmp_path: Path):
    limits = dataclasses.replace(LIMITS, reset_limit=None)
    with parts(tmp_path, {"a": 1, "b": 1}, limits) as job:
        job.start("a", "b")
        job.decide(0, 1)
        job.failures.failed(job.state.alive[1], -signal.SIGKILL)
        assert look(job, 100.0).ending is None
        job.manager.take({"a": 1, "b": 1, "c": 1})
        job.start("c")
        job.decide(0, 2)
        assert look(job, 650.0).ending is None
        job.failures.failed(job.state.alive[2], -signal.SIGKILL)
        assert look(job, 1000.0).ending is None
        assert look(job, 1599.0).ending is None
        assert look(job, 1600.0).ending is not None


@pytest.mark.parametrize("meets", [True, False])
def test_workers_lost_again_and_again(tmp_path: Path, meets: bool):
    with parts(tmp_path, {"a": 1, "b": 1}, LIMITS, max_failures=100) as job:
        endings = []
        for _ in range(2):
            processes = job.start("a", "b")
            job.decide(*job.state.alive)
            if meets:
                job.state.mark_formed(job.state.number)
            for process in processes:
                job.failures.failed(process, -signal.SIGKILL)
            endings.append(look(job, 0.0).ending)
        assert endings[0] is None
        assert (endings[1] is None) == meets


def test_none_could_be_started(tmp_path: Path):
    with parts(tmp_path, {"a": 1}, LIMITS) as job:
        (process,) = job.start("a")
        process.pid = 0
        job.failures.could_not_start(process, "python: no such file")
        ending = look(job, 0.0).ending
        assert ending == Ending("cannot start a worker on a: python: no such file", status=127)


def test_none_could_be_started_but_there_are_other_hosts(tmp_path: Path):
    limits = dataclasses.replace(LIMITS, num_proc=1, min_np=1, max_np=1)
    with parts(tmp_path, {"a": 1, "b": 1}, limits) as job:
        for host, ends in ("a", False), ("b", True):
            (process,) = job.start(host)
            process.pid = 0
            job.failures.could_not_start(process, "the node is gone")
            plan = look(job, 0.0)
            assert plan.begin_anew != ends
            assert (plan.ending is not None) == ends, "once: then it is the job's fault"
