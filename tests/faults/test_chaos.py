"""SIGKILL at random points of a busy loop: nothing hangs, all hear of it, nothing is left."""

from __future__ import annotations

import random
import signal
import time

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.effort import examples
from tests.faults import TRANSPORTS
from tests.faults.leftovers import (
    descendants,
    files_in,
    named_shared_memory,
    private_temporary_folder,
    still_running,
)
from tests.ranks import start_ranks, tell

SIZE = 3


def _several_at_once(rank: int, size: int, choice: random.Random) -> None:
    names = [f"n{i}" for i in range(choice.randint(2, 12))]
    elements = choice.choice([1, 100, 30_000])
    order = names[rank:] + names[:rank]  # every rank submits in an order of its own
    handles = [hvd.allreduce_async(torch.ones(elements), name=n, op=hvd.Sum) for n in order]
    for handle in handles:
        assert hvd.synchronize(handle)[0].item() == size


def _one_after_another(rank: int, size: int, choice: random.Random) -> None:
    elements = choice.choice([1, 1000, 100_000, 1_000_000])
    kind = choice.choice(["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"])
    if kind == "allreduce":
        result = hvd.allreduce(torch.ones(elements), name="a", op=hvd.Sum)
        assert result[-1].item() == size
    elif kind == "allgather":
        result = hvd.allgather(torch.full((rank + 1, 100), rank), name="b")
        assert len(result) == size * (size + 1) // 2
    elif kind == "broadcast":
        root = choice.randrange(size)
        assert hvd.broadcast(torch.full((elements,), rank), root, name="c")[0].item() == root
    elif kind == "alltoall":
        splits = torch.tensor([50] * size, dtype=torch.int32)
        result, _ = hvd.alltoall(torch.full((size * 50,), rank), splits, name="d")
        assert result[-1].item() == size - 1
    else:
        result = hvd.reducescatter(torch.ones(size * 100), name="e", op=hvd.Sum)
        assert result[0].item() == size


def _loop(rank: int, size: int, seed: int) -> str:
    choice = random.Random(seed)  # the same on all ranks
    hvd.init()
    tell("looping")
    try:
        while True:
            step = choice.choice([_several_at_once, _one_after_another, _one_after_another])
            step(rank, size, choice)
    except HorovodInternalError as error:
        hvd.shutdown()
        return str(error)


@pytest.mark.parametrize(("transport", "rounds"), [("shm", examples(50)), ("gloo", examples(10))])
def test_kill_a_random_rank_at_a_random_time(transport: str, rounds: int):
    choice = random.Random(20240229)
    with private_temporary_folder() as folder:
        env = TRANSPORTS[transport] | {"TMPDIR": folder}
        for number in range(rounds):
            victim, delay = choice.randrange(SIZE), choice.uniform(0, 0.1)
            with start_ranks(_loop, SIZE, number, env=env) as ranks:
                for rank in range(SIZE):
                    ranks.heard(rank)
                time.sleep(delay)  # the random point
                assert not named_shared_memory(ranks.pids)
                processes = descendants(ranks)
                ranks.signal(victim, signal.SIGKILL)
                outcomes = ranks.wait()
                survivors = [o for o in outcomes if o.rank != victim]
                for outcome in survivors:
                    assert outcome.error is None, f"round {number}\n{outcome.describe()}"
                    assert outcome.exitcode == 0, f"round {number}\n{outcome.describe()}"
                messages = [o.result for o in survivors]
                # A survivor that is late may notice the other's departure first.
                assert any(f"rank {victim}" in m for m in messages), (number, victim, messages)
                assert not still_running(processes)
            assert not files_in(folder), f"round {number}"
