"""A rank that is killed: the others raise, say who is gone, and are able to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.faults import TRANSPORTS
from tests.ranks import listen, start_ranks, tell

VICTIM = 1

OPERATIONS: dict[str, Callable[[], object]] = {
    "allreduce": lambda: hvd.allreduce(torch.ones(4), name="x"),
    "large allreduce": lambda: hvd.allreduce(torch.ones(4_000_000), name="x"),
    "asynchronous": lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(4), name="x")),
    "allgather": lambda: hvd.allgather(torch.ones(hvd.rank() + 1), name="x"),
    "broadcast from the victim": lambda: hvd.broadcast(torch.ones(4), VICTIM, name="x"),
    "alltoall": lambda: hvd.alltoall(torch.ones(hvd.size()), name="x"),
    "barrier": hvd.barrier,
    "join": hvd.join,
}


def _lose_a_rank(rank: int, size: int, operation: str, forks: bool) -> str:
    hvd.init()
    hvd.allreduce(torch.ones(4), name="warm up")
    if rank == VICTIM:
        if forks and os.fork() == 0:
            signal.pause()  # as a DataLoader worker: keeps all inherited descriptors open
        tell("in place")
        signal.pause()
    tell("in place")
    with pytest.raises(HorovodInternalError) as caught:
        OPERATIONS[operation]()
    tell(str(caught.value))
    listen()  # until all survivors have raised: an exit must not be what the others notice
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(torch.ones(1), name="after the loss")
    hvd.shutdown()
    return "ended in order"


def _check(operation: str, size: int, env: dict[str, str], forks: bool = False) -> None:
    survivors = [r for r in range(size) if r != VICTIM]
    with start_ranks(_lose_a_rank, size, operation, forks, env=env) as ranks:
        for rank in range(size):
            assert ranks.heard(rank) == "in place"
        for rank in range(size):
            ranks.wait_until_blocked(rank)
        ranks.signal(VICTIM, signal.SIGKILL)
        for rank in survivors:
            assert f"rank {VICTIM}" in ranks.heard(rank)
        ranks.say()
        for outcome in ranks.wait(ranks=survivors):
            assert (outcome.result, outcome.exitcode) == ("ended in order", 0), outcome.describe()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_survivors_raise_and_name_the_lost_rank(operation: str):
    _check(operation, 3, TRANSPORTS["shm"])


@pytest.mark.parametrize("operation", ["allreduce", "large allreduce", "allgather", "barrier"])
def test_survivors_raise_and_name_the_lost_rank_gloo(operation: str):
    _check(operation, 3, TRANSPORTS["gloo"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_children_of_the_dead_rank_that_live_on_hide_nothing(transport: str):
    _check("allreduce", 2, TRANSPORTS[transport], forks=True)


def _start_again(rank: int, size: int) -> str:
    if rank == VICTIM:
        hvd.init()
        tell("in place")
        signal.pause()
    hvd.init()
    tell("in place")
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(torch.ones(1), name="x")
    hvd.shutdown()
    for name, value in {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        os.environ[f"HOROVOD_{name}"] = value
    hvd.init()
    return f"alone: {hvd.allreduce(torch.ones(1), op=hvd.Sum).item()} of {hvd.size()}"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_survivor_can_start_again(transport: str):
    with start_ranks(_start_again, 2, env=TRANSPORTS[transport]) as ranks:
        for rank in (0, 1):
            ranks.heard(rank)
        ranks.signal(VICTIM, signal.SIGKILL)
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.result == "alone: 1.0 of 1", outcome.describe()
