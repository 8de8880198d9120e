"""A rank that dies, or a host that is cut off, while ranks on several hosts wait."""

from __future__ import annotations

import signal
import time

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.hosts import Hosts
from tests.ranks import listen, tell

PROMISED = 5.0  # seconds within which the survivors know
TIMES = 3  # that a promise may be tried: a busy machine adds its own time
LARGE = 1_000_000


def _lose_a_rank(rank: int, size: int, victim: int, elements: int) -> str:
    hvd.init()
    hvd.allreduce(torch.ones(4), name="warm up")
    tell("in place")
    if rank == victim:
        signal.pause()
    with pytest.raises(HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(elements), name="x")
    tell(str(caught.value))
    listen()  # until all survivors have raised: an exit must not be what the others notice
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(torch.ones(1), name="after the loss")
    hvd.shutdown()
    return "ended in order"


@pytest.mark.parametrize(
    ("ranks_per_host", "victim"),
    [([2, 2], 0), ([2, 2], 3), ([2, 1], 2), ([2, 1], 1), ([1, 1, 1], 1)],
    ids=["first of 2+2", "last of 2+2", "alone in 2+1", "beyond the lanes of 2+1", "1+1+1"],
)
def test_survivors_on_all_hosts_name_the_lost_rank(
    hosts: Hosts, ranks_per_host: list[int], victim: int
):
    survivors = [rank for rank in range(sum(ranks_per_host)) if rank != victim]
    took = []
    while len(took) < TIMES and (not took or took[-1] >= PROMISED):
        took.append(_seconds_until_all_know(hosts, ranks_per_host, victim, survivors))
    assert took[-1] < PROMISED, took


def _seconds_until_all_know(
    hosts: Hosts, ranks_per_host: list[int], victim: int, survivors: list[int]
) -> float:
    size = sum(ranks_per_host)
    with hosts.start(_lose_a_rank, ranks_per_host, victim, LARGE) as ranks:
        for rank in range(size):
            assert ranks.heard(rank) == "in place"
        for rank in range(size):
            ranks.wait_until_blocked(rank)
        began = time.monotonic()
        ranks.signal(victim, signal.SIGKILL)
        for rank in survivors:
            assert f"rank {victim} " in ranks.heard(rank)
        took = time.monotonic() - began
        ranks.say()
        for outcome in ranks.wait(ranks=survivors):
            assert (outcome.result, outcome.exitcode) == ("ended in order", 0), outcome.describe()
    return took


QUICK = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8",  # before which all have warmed up
}


def _lose_the_network(rank: int, size: int, elements: int) -> str:
    hvd.init()
    hvd.allreduce(torch.ones(4), name="warm up")
    tell("in place")
    listen()
    try:
        hvd.allreduce(torch.ones(elements), name="x")
    except HorovodInternalError as error:
        tell(str(error))
    else:
        tell("no error")
    listen()
    hvd.shutdown()
    return "ended in order"


@pytest.mark.parametrize(
    ("ranks_per_host", "victim"), [([2, 1], 0), ([1, 1, 1], 1)], ids=["2+1", "1+1+1"]
)
def test_both_sides_of_a_cut_give_up(hosts: Hosts, ranks_per_host: list[int], victim: int):
    size = sum(ranks_per_host)
    with hosts.start(_lose_the_network, ranks_per_host, LARGE, env=QUICK) as ranks:
        for rank in range(size):
            assert ranks.heard(rank) == "in place"
        hosts.cut(victim)
        try:
            ranks.say()
            for rank in range(size):
                assert "stalled" in ranks.heard(rank)
            ranks.say()
            for outcome in ranks.wait():
                assert (outcome.result, outcome.exitcode) == ("ended in order", 0), (
                    outcome.describe()
                )
        finally:
            hosts.heal(victim)
