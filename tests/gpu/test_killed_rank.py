"""A rank with a GPU is killed, or stopped for a while: the others raise, or wait, and go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.accelerators import nccl_environment, own_device
from tests.gpu import LIMIT, SOON
from tests.ranks import listen, start_ranks, tell

VICTIM = 1
PAUSE = 2.0  # seconds for which a rank is stopped: longer than any collective here

pytestmark = pytest.mark.killing


class Training:
    """A few layers, large enough that their reduction takes a while."""

    def __init__(self, device: torch.device, width: int = 512) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(device)
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01), self.model.named_parameters()
        )
        self.data = torch.full((4, width), 0.01 * (hvd.rank() + 1), device=device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()
        self.optimizer.step()


def complete(device: torch.device) -> None:
    """Until the device has done everything: its errors come late."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


# -- killed -------------------------------------------------------------------------------------


def reduce_large(device: torch.device) -> Callable[[], None]:
    """The victim dies somewhere in a transfer; the others are in their kernels."""
    tensor = torch.ones(10_000_000, device=device)

    def once() -> None:
        hvd.allreduce_(tensor, name="large", op=hvd.Average)
        complete(device)

    return once


def reduce_many(device: torch.device) -> Callable[[], None]:
    """Many small ones under way at a time."""
    tensors = [torch.ones(10_000, device=device) for _ in range(40)]

    def once() -> None:
        handles = [hvd.allreduce_async_(t, name=f"many.{i}") for i, t in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)
        complete(device)

    return once


def move(device: torch.device) -> Callable[[], None]:
    """The other collectives, one after the other."""
    rows = torch.ones(hvd.size() * 100_000, device=device)

    def once() -> None:
        hvd.allgather(rows, name="gathered")
        hvd.broadcast_(rows, VICTIM, name="broadcast")
        hvd.alltoall(rows, name="exchanged")
        hvd.reducescatter(rows, name="scattered")
        complete(device)

    return once


def train(device: torch.device) -> Callable[[], None]:
    training = Training(device)

    def once() -> None:
        training.step()
        complete(device)

    return once


def replay(device: torch.device) -> Callable[[], None]:
    """Training steps in a CUDA graph: no code of ours runs while the device waits."""
    training = Training(device)
    step = hvd.graphed(training.step, warmup=2)

    def once() -> None:
        step()
        complete(device)

    return once


def _until_failure(once: Callable[[], None]) -> str:
    """Go on until it fails; what the error says."""
    while True:
        try:
            once()
        except HorovodInternalError as error:
            return str(error)


PROGRAMS = {
    "large allreduce": reduce_large,
    "many": reduce_many,
    "others": move,
    "train": train,
    "replay": replay,
}


def lose_a_rank(rank: int, size: int, program: str, waits: bool) -> str:
    """`waits`: the victim stands still while the others go on, and so is between two steps."""
    hvd.init()
    device = own_device()
    once = PROGRAMS[program](device)
    for _ in range(3):
        once()
    tell("warmed up")
    if rank == VICTIM and waits:
        signal.pause()
    tell(_until_failure(once))
    listen()  # until all survivors have raised: an exit must not be what the others notice
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(torch.ones(1, device=device), name="after the loss")
    hvd.shutdown()
    assert float(torch.ones(1000, device=device).sum()) == 1000.0, "the device still works"
    return "ended in order"


def check_loss(program: str, size: int, waits: bool) -> None:
    survivors = [rank for rank in range(size) if rank != VICTIM]
    with start_ranks(lose_a_rank, size, program, waits, env=nccl_environment(size)) as ranks:
        for rank in range(size):
            assert ranks.heard(rank, LIMIT) == "warmed up"
        ranks.signal(VICTIM, signal.SIGKILL)
        for rank in survivors:
            assert f"rank {VICTIM}" in ranks.heard(rank, SOON)
        ranks.say()
        for outcome in ranks.wait(SOON, survivors):
            assert (outcome.result, outcome.exitcode) == ("ended in order", 0), outcome.describe()


@pytest.mark.parametrize("program", PROGRAMS)
def test_killed_in_the_middle(program: str):
    check_loss(program, 3, waits=False)


@pytest.mark.parametrize("program", ["large allreduce", "train", "replay"])
def test_killed_between_two_steps(program: str):
    check_loss(program, 3, waits=True)


@pytest.mark.parametrize("size", [2, 4])
def test_killed_in_jobs_of_other_sizes(size: int):
    check_loss("train", size, waits=False)


def start_again(rank: int, size: int) -> float:
    """The survivor of two ranks goes on alone, with a new communicator."""
    hvd.init()
    device = own_device()
    once = train(device)
    once()
    tell("warmed up")
    if rank == VICTIM:
        signal.pause()
    assert f"rank {VICTIM}" in _until_failure(once)
    hvd.shutdown()
    for name, value in {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        os.environ[f"HOROVOD_{name}"] = value
    hvd.init()
    result = float(hvd.allreduce(torch.ones(1, device=device), op=hvd.Sum))
    hvd.shutdown()
    return result


def test_a_survivor_can_start_again():
    with start_ranks(start_again, 2, env=nccl_environment(2)) as ranks:
        for rank in (0, 1):
            ranks.heard(rank, LIMIT)
        ranks.signal(VICTIM, signal.SIGKILL)
        (outcome,) = ranks.wait(SOON, [0])
        assert outcome.result == 1.0, outcome.describe()


# -- stopped ------------------------------------------------------------------------------------


def train_through(rank: int, size: int, steps: int) -> list[torch.Tensor]:
    hvd.init()
    training = Training(own_device())
    for step in range(steps):
        training.step()
        if step == 3:
            tell("warmed up")
    return [param.detach().cpu() for param in training.model.parameters()]


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_stopped_and_continued(size: int):
    """Nothing is lost, however long it takes."""
    env = nccl_environment(size, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"})
    with start_ranks(train_through, size, 100, env=env) as ranks:
        for rank in range(size):
            assert ranks.heard(rank, LIMIT) == "warmed up"
        ranks.signal(VICTIM, signal.SIGSTOP)
        time.sleep(PAUSE)
        ranks.signal(VICTIM, signal.SIGCONT)
        results = ranks.results(LIMIT)
    for found in results:
        for mine, theirs in zip(found, results[0], strict=True):
            assert torch.equal(mine, theirs), "ranks differ"
            assert bool(mine.isfinite().all())
