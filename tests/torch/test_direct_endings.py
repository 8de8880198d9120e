"""How training ends on devices: lost, leaving and broken ranks, aborts, and the orderly end.

With CPU tensors and Gloo in NCCL's place.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.engine.collective import LanePlan
from horovod.engine.execution.lane import Lane
from horovod.engine.runtime import runtime
from horovod.transport.device.farewells import await_farewells
from tests.ranks import RankPool, listen, run_ranks, start_ranks, tell
from tests.torch.direct import Training, direct, distributed, lanes, own_device
from tests.transport import device_stand_in


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2, env=own_device)
    yield pool
    pool.close()


def ends_differently(rank: int, size: int, how: str) -> str:
    hvd.init()
    training = Training()
    model = training.model()
    with lanes():
        optimizer = distributed(model)
        for step in range(100):
            optimizer.zero_grad()
            training.loss(model, step, 0, rank).backward()
            if step == 3:
                tell("in the middle of a step")
            try:
                if rank == 1 and step == 3 and how == "other operation":
                    hvd.broadcast(torch.ones(3), root_rank=1, name="something else")
                if rank == 1 and step == 3 and how == "is killed":
                    signal.pause()
                if rank == 1 and step == 3 and how == "leaves":
                    hvd.shutdown()
                    return ""
                optimizer.step()
            except HorovodInternalError as error:
                return str(error)
    return "it went on"


def test_a_killed_rank_is_named() -> None:
    with start_ranks(ends_differently, 3, "is killed", env=own_device) as ranks:
        for rank in range(3):
            assert ranks.heard(rank) == "in the middle of a step"
        ranks.signal(1, signal.SIGKILL)
        outcomes = ranks.wait(ranks=[0, 2])
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
        assert "rank 1" in outcome.result
        assert "died" in outcome.result


def dies_while_it_connects(rank: int, size: int) -> str:
    """The others are then in the library, which waits for it for ever."""
    hvd.init()
    training = Training()
    model = training.model()

    def barrier(transport: Any) -> None:
        tell("connecting")
        threading.Event().wait()

    with lanes(), mock.patch.object(device_stand_in.GlooInNcclsPlace, "barrier", barrier):
        optimizer = distributed(model)
        training.loss(model, 0, 0, rank).backward()
        try:
            optimizer.step()
        except HorovodInternalError as error:
            return str(error)
    return "it went on"


def test_a_rank_that_dies_while_it_connects_is_named() -> None:
    with start_ranks(dies_while_it_connects, 3, env=own_device) as ranks:
        for rank in range(3):
            assert ranks.heard(rank) == "connecting"
        ranks.signal(1, signal.SIGKILL)
        outcomes = ranks.wait(ranks=[0, 2])
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
        assert "rank 1" in outcome.result
        assert "died" in outcome.result


def test_a_rank_that_does_something_else_is_named() -> None:
    first, second = run_ranks(ends_differently, 2, "other operation", env=own_device)
    for message in (first, second):
        assert "'something else'" in message
        assert "'DistributedOptimizer.0'" in message


def test_a_rank_that_leaves_is_named() -> None:
    first, _ = run_ranks(ends_differently, 2, "leaves", env=own_device)
    assert "rank 1 has shut down Horovod" in first


def many_optimizers(count: int) -> tuple[int, int]:
    """As in a search for parameters: each optimizer is dropped before the next is made."""
    for _ in range(count):
        model = nn.Linear(3, 2)
        optimizer = distributed(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        direct(optimizer)
        del model, optimizer
        gc.collect()
    await_farewells()
    job = runtime._job
    assert job is not None
    executor = job.channels[0]._executor
    return len(job.channels[0].lanes), len(executor._lanes)


def lanes_of_many_optimizers() -> tuple[int, int]:
    with lanes():
        return many_optimizers(8)


def test_lanes_are_closed_when_their_optimizers_are_gone(pair: RankPool) -> None:
    before, after = pair.run(lanes_of_many_optimizers), pair.run(lanes_of_many_optimizers)
    assert before == after, "communicators are leaking"


def has_a_broken_device(rank: int, size: int) -> str:
    """Rank 1's device fails in the middle of a step, of which its program says nothing."""
    hvd.init()
    training = Training()
    model = training.model()
    with lanes():
        optimizer = distributed(model)
        for step in range(3):
            optimizer.zero_grad()
            training.loss(model, step, 0, rank).backward()
            optimizer.step()
        tell("trained")
        if rank == 1:
            error = RuntimeError("device-side assert triggered")
            with mock.patch.object(device_stand_in.Work, "is_completed", side_effect=error):
                listen()
            return ""
        optimizer.zero_grad()
        training.loss(model, 3, 0, rank).backward()
        try:
            optimizer.step()
        except HorovodInternalError as error:
            return str(error)
    return "it went on"


def test_a_device_that_fails_is_named_on_the_other_ranks() -> None:
    with start_ranks(has_a_broken_device, 3, env=own_device) as ranks:
        for rank in range(3):
            assert ranks.heard(rank) == "trained"
        outcomes = ranks.wait(ranks=[0, 2])
        ranks.say()
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
        assert "rank 1 failed in GLOO on cpu: device-side assert triggered" in outcome.result


def ends_at_once(rank: int, size: int) -> str:
    """Every rank shuts down right after its last step, to which the second comes later."""
    hvd.init()
    training = Training()
    model = training.model()
    confirm = Lane.confirm

    def confirm_late(lane: Lane, plan: LanePlan) -> Any:
        listen()
        return confirm(lane, plan)

    with lanes():
        optimizer = distributed(model)
        for step in range(4):
            optimizer.zero_grad()
            training.loss(model, step, 0, rank).backward()
            # All that it has begun is then complete, but the ranks have not compared it.
            late = mock.patch.object(Lane, "confirm", confirm_late)
            with late if step == 3 and rank == 1 else contextlib.nullcontext():
                optimizer.step()
        tell("about to shut down")
        if rank == 1:
            direct(optimizer).finish_comparison()
        hvd.shutdown()
    return "trained"


def test_the_first_to_shut_down_is_not_taken_for_lost() -> None:
    with start_ranks(ends_at_once, 2, env=own_device) as ranks:
        assert ranks.heard(0) == "about to shut down"
        ranks.wait_until_blocked(0)  # it waits for the other
        ranks.say()
        assert ranks.results() == ["trained", "trained"]


def saves_after_an_abort(in_flight: bool) -> str:
    """A state is worth keeping after an abort, unless it came in the middle of a step."""
    training = Training()
    model = training.model()
    with lanes():
        optimizer = distributed(model)
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        for step in range(3):
            optimizer.zero_grad()
            training.loss(model, step, 0, hvd.rank()).backward()
            optimizer.step()
        direct(optimizer).finish_comparison()
        state.step = 3
        busy = mock.patch.object(device_stand_in.Work, "is_completed", return_value=not in_flight)
        with busy:
            direct(optimizer).lane.abort(HorovodInternalError("enough"))
            try:
                state.save()
            except HorovodInternalError as error:
                return f"{error}, step {state._saved_state['step']}"
    return f"saved, step {state._saved_state['step']}"


@pytest.mark.parametrize(
    ("in_flight", "outcome"), [(False, "saved, step 3"), (True, "enough, step 0")]
)
def test_what_was_aborted_in_the_middle_is_not_committed(in_flight: bool, outcome: str) -> None:
    pool = RankPool(2, env=own_device)
    assert pool.run(saves_after_an_abort, in_flight) == [outcome, outcome]
    pool.close(orderly=False)
