"""Gradients on their way between hosts while a host dies, a link goes down or a rank stops."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.faults.bucket_cases import LAYERS, Training, one_bucket_each
from tests.hosts import Hosts
from tests.ranks import Ranks, listen, tell

PROMISED = 5.0  # seconds within which the survivors of a dead host know
OUTAGE = 3.0  # seconds; kernels repeat what got lost
PATIENCE = 6  # seconds without an answer after which a host counts as lost
TIMES = 3  # that a promise may be tried: a busy machine adds its own time

PLACES = {"1+1+1": [1, 1, 1], "2+1": [2, 1], "2+2": [2, 2]}


def _in_backward(rank: int, size: int, waiting: list[int], more: int) -> Any:
    """Some ranks wait in the middle of backward for the test, when some buckets are on their way.

    Then go on for `more` steps; what became of it.
    """
    hvd.init()
    with one_bucket_each():
        training = Training()
        tell("trained")
        if rank in waiting:

            def wait(*_: Any) -> None:
                hook.remove()
                tell("in backward")
                listen()

            hook = training.model.layers[LAYERS // 2].register_full_backward_hook(wait)
        listen()
        try:
            for _ in range(more):
                training.step()
        except HorovodInternalError as error:
            tell(str(error))
            listen()  # an exit must not be what the others notice
            hvd.shutdown()
            return "ended in order"
        training.check()
        return torch.cat([p.detach().view(-1) for p in training.model.parameters()]).tolist()


def _reach_backward(ranks: Ranks, size: int, waiting: list[int]) -> None:
    """Until some wait in backward and the others for them."""
    for rank in range(size):
        assert ranks.heard(rank) == "trained"
    ranks.say()
    for rank in waiting:
        assert ranks.heard(rank) == "in backward"
    for rank in range(size):
        ranks.wait_until_blocked(rank)


def _check_end(ranks: Ranks, survivors: list[int]) -> None:
    ranks.say()
    for outcome in ranks.wait(ranks=survivors):
        assert (outcome.result, outcome.exitcode) == ("ended in order", 0), outcome.describe()


@pytest.mark.parametrize("places", ["2+2", "1+1+1"])
def test_a_host_that_dies_is_known_to_all_in_time(hosts: Hosts, places: str):
    size = sum(PLACES[places])
    dead = [2, 3] if places == "2+2" else [1]
    survivors = [rank for rank in range(size) if rank not in dead]
    took: list[float] = []
    while len(took) < TIMES and (not took or took[-1] >= PROMISED):
        with hosts.start(_in_backward, PLACES[places], dead, 6) as ranks:
            _reach_backward(ranks, size, dead)
            began = time.monotonic()
            for rank in dead:
                ranks.signal(rank, signal.SIGKILL)
            for rank in survivors:
                said = ranks.heard(rank)
                assert any(f"rank {each} " in said for each in dead), said
            took.append(time.monotonic() - began)
            _check_end(ranks, survivors)
    assert took[-1] < PROMISED, took


@pytest.mark.parametrize("places", ["2+1", "1+1+1"])
def test_training_survives_a_link_that_comes_back(hosts: Hosts, places: str):
    size = sum(PLACES[places])
    with hosts.start(_in_backward, PLACES[places], [1], 6) as ranks:
        _reach_backward(ranks, size, [1])
        hosts.cut(1)
        try:
            ranks.say()  # what is sent from now on gets lost
            time.sleep(OUTAGE)
        finally:
            hosts.heal(1)
        first, *others = ranks.results()
        assert all(other == first for other in others)


@pytest.mark.parametrize("places", ["2+1", "1+1+1"])
def test_a_link_that_stays_down_is_an_error_that_names_the_host(hosts: Hosts, places: str):
    size = sum(PLACES[places])
    beyond = size - 1  # the rank on the other side
    cut = len(PLACES[places]) - 1
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(PATIENCE)}
    with hosts.start(_in_backward, PLACES[places], [0], 6, env=env) as ranks:
        _reach_backward(ranks, size, [0])
        hosts.cut(cut)
        try:
            ranks.say()
            for rank in range(size):
                said = ranks.heard(rank)
                if rank == beyond:
                    assert "host0" in said or "host1" in said, said
                else:
                    assert f"host{cut}" in said, said
                    assert f"rank {beyond} " in said, said
            _check_end(ranks, list(range(size)))
        finally:
            hosts.heal(cut)


@pytest.mark.parametrize("places", ["2+1", "1+1+1"])
def test_a_rank_that_is_stopped_for_long_goes_on(hosts: Hosts, places: str):
    """Longer than a host may be silent, with megabytes on their way to it."""
    size = sum(PLACES[places])
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(PATIENCE)}
    with hosts.start(_exchange_much, PLACES[places], env=env) as ranks:
        for rank in range(size):
            assert ranks.heard(rank) == "exchanging"
        ranks.signal(size - 1, signal.SIGSTOP)
        ranks.wait_until_blocked(0)
        time.sleep(PATIENCE + 1)
        ranks.signal(size - 1, signal.SIGCONT)
        ranks.say()
        assert ranks.results() == ["right"] * size


def _exchange_much(rank: int, size: int) -> str:
    hvd.init()
    model = torch.nn.Linear(1500, 1500)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters()
    )
    done = torch.zeros(1)
    told = False
    with one_bucket_each():
        while not done.item():
            model(torch.full((1, 1500), float(rank))).sum().backward()
            optimizer.step()
            expected = sum(range(size)) / size
            assert (model.weight.grad == expected).all(), model.weight.grad
            optimizer.zero_grad()
            if not told:
                told = True
                tell("exchanging")
            done = hvd.allreduce(torch.tensor([float(_asked_to_end())]), op=hvd.Max, name="done")
    return "right"


def _asked_to_end() -> bool:
    from tests import rank_process

    assert rank_process._connection is not None
    return rank_process._connection.poll()
