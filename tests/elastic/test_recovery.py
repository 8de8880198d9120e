"""Workers that are lost, added or told to leave; all with real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch

import horovod.torch as hvd
from horovod.common.generations.decisions import DRIVER_LOST
from horovod.common.generations.membership import membership
from horovod.transport.network.links import Links
from tests.elastic.job import ElasticJob
from tests.elastic.training import Plan, expected, this_worker, train
from tests.faults import TRANSPORTS
from tests.ranks import Outcome, listen, tell


def _check(outcomes: list[Outcome], size: int) -> list[dict[str, Any]]:
    """All ended well, with the weights that as many steps give without any change."""
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
        assert outcome.exitcode == 0, outcome.describe()
    results = [outcome.result for outcome in outcomes]
    for result in results:
        assert result["ended"] == "returned"
        assert result["size"] == size
        assert result["weights"] == pytest.approx(expected(result["steps"]), abs=1e-6)
        assert result["weights"] == results[0]["weights"]
    assert sorted(result["rank"] for result in results) == list(range(size))
    return results


def _steps(result: dict[str, Any]) -> list[int]:
    return [step for step, _ in result["history"]]


def _tell_of_step_5(state: Any) -> None:
    if state.step == 5:
        tell("step 5")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_worker_costs_the_steps_since_the_last_commit(transport: str):
    env = TRANSPORTS[transport]
    with ElasticJob(train, Plan(halt={"w1": 5}), _tell_of_step_5, env=env) as job:
        job.start(3)
        for worker in range(3):  # a worker may be late with the step that another has finished
            assert job.heard(worker) == "step 5"
        assert job.heard(1) == "halt"
        job.kill(1)
        job.lose(1)
        results = _check(job.wait(ranks=[0, 2]), size=2)
    for result in results:
        assert result["history"] == [(step, 3) for step in range(1, 6)] + [
            (step, 2)
            for step in range(5, 11)  # step 5 once more
        ]


def test_a_step_that_is_interrupted_leaves_nothing_behind():
    """Reductions run in the background while backward goes on: they fail there first."""
    with ElasticJob(train, Plan(halt={"w0": 5}, overlap=True, size=2)) as job:
        job.start(2)
        assert job.heard(0) == "halt"
        job.kill(0)
        job.lose(0)
        job.start(1, kind="added")
        _check(job.wait(ranks=[1, 2]), size=2)


def test_a_worker_that_hangs_is_not_waited_for_once_the_driver_gives_it_up():
    """Its process lives, so nothing but the decision can end the others' wait."""
    with ElasticJob(train, Plan(halt={"w0": 5})) as job:
        job.start(3)
        assert job.heard(0) == "halt"
        job.signal(0, signal.SIGSTOP)
        job.wait_until_blocked(1)
        job.wait_until_blocked(2)
        job.lose(0)
        _check(job.wait(ranks=[1, 2]), size=2)


@pytest.mark.parametrize("as_rank_0", [False, True])
def test_a_new_worker_receives_the_state(as_rank_0: bool):
    """Even as rank 0: a worker may fail to synchronise, and be the oldest that is left."""
    with ElasticJob(train, Plan(steps=6, size=3, pause=3)) as job:
        job.start(2)
        assert [job.heard(0), job.heard(1)] == ["paused", "paused"]
        job.start(1, kind="added", front=as_rank_0)
        job.say_to([0, 1])
        results = _check(job.wait(), size=3)
    for result in results[:2]:
        assert _steps(result) == list(range(1, result["steps"] + 1)), "nothing is repeated"
    assert all(step > 3 for step in _steps(results[2]))


def test_a_worker_that_is_told_to_leave_takes_nothing_with_it():
    with ElasticJob(train, Plan(steps=6, size=2, pause=3)) as job:
        job.start(3)
        for worker in range(3):
            assert job.heard(worker) == "paused"
        job.signal(0, signal.SIGTERM)  # rank 0, of all
        job.wait_for_output(0, "SIGTERM")
        job.say()
        job.await_leaving(0)
        (leaver,) = job.wait(ranks=[0])
        assert (leaver.result["ended"], leaver.exitcode) == ("exit 0", 0), leaver.describe()
        assert leaver.result["steps"] == 4
        job.decide([1, 2], "removed", "w0 left")
        results = _check(job.wait(ranks=[1, 2]), size=2)
    for result in results:
        assert _steps(result) == list(range(1, result["steps"] + 1)), "nothing is repeated"


def _wait_for_the_newcomer(state: Any) -> None:
    """So that the commit after this step knows of it."""
    if state.step == 4 and this_worker() != "w2":
        member = membership()
        assert member is not None
        while member.newest.number < 2:
            time.sleep(0.01)


def test_the_last_workers_with_the_state_hand_it_to_newcomers_before_they_leave():
    with ElasticJob(train, Plan(steps=8, size=1, pause=3), _wait_for_the_newcomer) as job:
        job.start(2)
        for worker in (0, 1):
            assert job.heard(worker) == "paused"
            job.signal(worker, signal.SIGTERM)
            job.wait_for_output(worker, "SIGTERM")
        job.start(1, kind="added")
        job.say_to([0, 1])
        for worker in (0, 1):
            job.await_leaving(worker)
        leavers = job.wait(ranks=[0, 1])
        job.decide([2], "removed", "w0 and w1 left")
        (result,) = _check(job.wait(ranks=[2]), size=1)
    for leaver in leavers:
        assert (leaver.result["ended"], leaver.exitcode) == ("exit 0", 0), leaver.describe()
        assert leaver.result["history"] == [(step, 2) for step in range(1, 5)] + [(5, 3), (6, 3)]
    assert _steps(result) == list(range(5, result["steps"] + 1)), "it goes on where they were"


def test_a_worker_that_is_told_to_leave_during_a_recovery_hands_the_state_over():
    """The only other one that had it is lost, and w2 is new."""
    with ElasticJob(train, Plan(steps=8, size=1, halt={"w0": 5})) as job:
        job.start(2)
        assert job.heard(0) == "halt"
        job.wait_until_blocked(1)
        job.signal(1, signal.SIGUSR1)  # a batch system's notice: the same as SIGTERM
        job.kill(0)
        job.lose(0)
        job.start(1, kind="added")
        job.await_leaving(1)
        (leaver,) = job.wait(ranks=[1])
        assert (leaver.result["ended"], leaver.exitcode) == ("exit 0", 0), leaver.describe()
        job.decide([2], "removed", "w1 left")
        (result,) = _check(job.wait(ranks=[2]), size=1)
    assert _steps(result)[0] >= 5, "it goes on from the last commit"


def test_a_worker_without_a_place_ends_by_itself():
    with ElasticJob(train, Plan(steps=6, size=2, pause=3)) as job:
        job.start(3)
        for worker in range(3):
            job.heard(worker)
        job.decide([0, 2], "removed", "the host of w1 is wanted elsewhere")
        job.say()
        (removed,) = job.wait(ranks=[1])
        assert (removed.result["ended"], removed.exitcode) == ("exit 0", 0), removed.describe()
        assert "the host of w1 is wanted elsewhere" in removed.output
        _check(job.wait(ranks=[0, 2]), size=2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_next_worker_dies_during_the_recovery(transport: str):
    with ElasticJob(train, Plan(halt={"w1": 5}), env=TRANSPORTS[transport]) as job:
        job.start(4)
        assert job.heard(1) == "halt"
        job.signal(2, signal.SIGSTOP)
        job.kill(1)
        job.lose(1)
        job.await_seen(2, 0, 3)  # they wait for w2 now
        job.kill(2)
        job.lose(2)
        _check(job.wait(ranks=[0, 3]), size=2)


def test_recovery_down_to_one_worker():
    with ElasticJob(train, Plan(halt={"w0": 5, "w1": 5})) as job:
        job.start(3)
        assert [job.heard(0), job.heard(1)] == ["halt", "halt"]
        job.kill(0)
        job.kill(1)
        job.lose(0)
        job.lose(1)  # right after: the first of the two generations never comes about
        _check(job.wait(ranks=[2]), size=1)


def test_a_worker_that_was_slow_to_fail_is_replaced():
    """Growing and losing in one recovery: w1 dies, w3 comes."""
    with ElasticJob(train, Plan(halt={"w1": 5}, size=3)) as job:
        job.start(3)
        assert job.heard(1) == "halt"
        job.kill(1)
        job.lose(1)
        job.start(1, kind="added")
        _check(job.wait(ranks=[0, 2, 3]), size=3)


# -- faults in certain places --------------------------------------------------------------------


class _Slow:
    """A value whose synchronisation never ends on one worker."""


class _SlowHandler(hvd.elastic.state.StateHandler):
    def save(self) -> None:
        pass

    def restore(self) -> None:
        pass

    def sync(self) -> None:
        if this_worker() == "w1":
            tell("in sync")
            signal.pause()
        hvd.broadcast_object("something", name="slow")


def _train_with_slow_sync(plan: Plan) -> dict[str, Any]:
    from horovod.torch.elastic import state as module

    module.set_handler_registry([*module.get_handler_registry(), (_Slow, _SlowHandler)])
    hvd.init()
    state = hvd.elastic.TorchState(torch.nn.Linear(2, 2), step=0, slow=_Slow())

    @hvd.elastic.run
    def loop(state: Any) -> int:
        while state.step < plan.steps:
            hvd.allreduce(torch.ones(1), name="step")
            state.step += 1
            state.commit()
        return hvd.size()

    return {"size": loop(state), "step": state.step}


def test_a_worker_dies_while_states_are_synchronised():
    with ElasticJob(_train_with_slow_sync, Plan(steps=3)) as job:
        job.start(3)
        assert job.heard(1) == "in sync"
        job.kill(1)
        job.lose(1)
        for outcome in job.wait(ranks=[0, 2]):
            assert outcome.result == {"size": 2, "step": 3}, outcome.describe()


def _stop(links: Links, ranks: list[int], seconds: float | None) -> None:
    """This process has told the others where it listens: stop it for good."""
    tell("told")
    os.kill(os.getpid(), signal.SIGSTOP)


def _train_with_a_stop_in_tcp(plan: Plan) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        if this_worker() == "w1":
            stack.enter_context(mock.patch.object(Links, "connect", _stop))
        return train(plan)


def test_a_worker_stops_while_connections_are_made():
    env = TRANSPORTS["gloo"] | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "1000"}  # that TCP waits by itself
    with ElasticJob(_train_with_a_stop_in_tcp, Plan(), env=env) as job:
        job.start(3)
        assert job.heard(1) == "told"
        job.lose(1)
        _check(job.wait(ranks=[0, 2]), size=2)


# -- a decision that never comes -----------------------------------------------------------------


def _fail_once(plan: Plan) -> dict[str, Any]:
    failed: list[int] = []

    def mismatch(state: Any) -> None:
        if state.step == 5 and not failed:
            failed.append(1)
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="different shapes")

    return train(plan, mismatch)


def test_a_failure_that_killed_nobody_needs_no_decision():
    with ElasticJob(_fail_once, Plan()) as job:
        job.start(2)
        for result in _check(job.wait(), size=2):
            assert _steps(result) == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]


def _always_fail(plan: Plan) -> Any:
    def mismatch(state: Any) -> None:
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="different shapes")

    return train(plan, mismatch)


def test_the_same_failure_again_and_again_ends_the_worker():
    with ElasticJob(_always_fail, Plan()) as job:
        job.start(2)
        for outcome in job.wait():
            assert "HorovodInternalError" in (outcome.error or ""), outcome.describe()
            assert "different shapes" in (outcome.error or ""), outcome.describe()


# -- signals -------------------------------------------------------------------------------------


def _fork_a_child(plan: Plan) -> dict[str, Any]:
    endings = []

    def fork(state: Any) -> None:
        receiving, sending = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(sending, b"!")
            signal.pause()
            os._exit(0)
        os.read(receiving, 1)
        os.kill(child, signal.SIGTERM)  # as a DataLoader ends its workers
        endings.append(os.WTERMSIG(os.waitpid(child, 0)[1]))

    return {**train(plan, fork), "endings": endings}


def test_children_do_not_take_sigterm_for_a_request_to_leave():
    with ElasticJob(_fork_a_child, Plan(steps=2)) as job:
        job.start(1)
        (outcome,) = job.wait()
        assert outcome.result["endings"] == [signal.SIGTERM] * 2, outcome.describe()


# -- the driver ----------------------------------------------------------------------------------


def test_workers_end_when_their_driver_is_gone():
    with ElasticJob(train, Plan(halt={"w1": 5})) as job:
        job.start(2)
        assert job.heard(1) == "halt"
        job.wait_until_blocked(0)  # in a collective
        job.lose_driver()
        waiting, idle = job.wait()
        assert waiting.result["ended"] == f"exit {DRIVER_LOST}", waiting.describe()
        assert "the driver of this elastic job (horovodrun) is gone" in waiting.output
        assert idle.exitcode == DRIVER_LOST, idle.describe()  # it was ended where it stood
        assert "the driver of this elastic job (horovodrun) is gone" in idle.output


# -- process sets --------------------------------------------------------------------------------


def _with_process_sets(plan: Plan) -> None:
    first, last = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[first, last])

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while True:
            sums: list[Any] = []
            for chosen in (first, last):
                try:
                    if chosen.included():
                        one = torch.ones(1)
                        total = hvd.allreduce(one, op=hvd.Sum, name="x", process_set=chosen)
                        sums.append(total.item())
                except ValueError as error:
                    sums.append(str(error))
            tell((hvd.size(), hvd.rank(), sums))
            if listen() == b"end":
                return
            state.check_host_updates()

    loop(hvd.elastic.TorchState())


def test_process_sets_are_made_again_where_their_ranks_exist():
    with ElasticJob(_with_process_sets, Plan()) as job:
        job.start(3)
        for worker, sums in enumerate([[2.0], [2.0, 2.0], [2.0]]):
            assert job.heard(worker) == (3, worker, sums)
        job.kill(0)
        job.lose(0)
        job.say_to([1, 2])  # to the check, which fails
        assert job.heard(1) == (2, 0, [2.0])
        size, rank, (first, error) = job.heard(2)
        assert (size, rank, first) == (2, 1, 2.0)
        assert "ranks=[1, 2]" in error
        assert "the job has only 2 ranks now" in error
        job.start(1, kind="added")
        heard = [2]
        while heard[0] == 2:  # until they have heard of it
            job.say_to([1, 2])
            heard = job.heard(1)
            other = job.heard(2)
        assert heard == (3, 0, [2.0])
        assert other == (3, 1, [2.0, 2.0])
        assert job.heard(3) == (3, 2, [2.0])
        job.say_to([1, 2, 3], b"end")
        for outcome in job.wait(ranks=[1, 2, 3]):
            assert outcome.error is None, outcome.describe()
