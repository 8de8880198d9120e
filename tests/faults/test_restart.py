"""Shutting down and starting again, many times in one process, costs nothing that stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

import horovod.torch as hvd
from horovod.engine.runtime import runtime
from horovod.transport.host import steps
from horovod.transport.host.steps import SteppedTransport
from tests.faults import TRANSPORTS
from tests.ranks import run_ranks

MEBIBYTE = 1 << 20


def _holdings() -> dict[str, int]:
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for line in maps if "memfd:" in line)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared mappings": mappings,
    }


def _settled_holdings(expected: dict[str, int], patience: float = 10) -> dict[str, int]:
    """What is held; a thread that was joined may be on the kernel's list a moment longer."""
    deadline = time.monotonic() + patience
    while (held := _holdings()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def _cycles(rank: int, size: int, number: int) -> tuple[dict[str, int], dict[str, int], float]:
    settled: dict[str, int] = {}
    memory = 0
    for cycle in range(number):
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (rank, size)
        total = hvd.allreduce(torch.full((1000,), float(cycle)), name="a", op=hvd.Sum)
        assert total[0].item() == cycle * size
        gathered = hvd.allgather(torch.full((rank + 1,), rank), name="b")
        assert len(gathered) == size * (size + 1) // 2
        handles = [hvd.allreduce_async(torch.ones(10), name=f"c{i}") for i in range(5)]
        assert all(hvd.synchronize(h)[0].item() == 1 for h in handles)
        hvd.shutdown()
        if cycle == number // 5:  # what is made once has been made
            settled = _settled_holdings({**_holdings(), "threads": 1})
            memory = psutil.Process().memory_info().rss
    grown = (psutil.Process().memory_info().rss - memory) / MEBIBYTE
    return settled, _settled_holdings(settled, patience=100), grown


@pytest.mark.parametrize(("transport", "number"), [("shm", 100), ("gloo", 20)])
def test_cycles_of_init_and_shutdown(transport: str, number: int):
    for settled, final, grown in run_ranks(
        _cycles, 2, number, env=TRANSPORTS[transport], timeout=240
    ):
        assert final == settled
        assert grown < 16, f"{grown:.0f} MiB more after {number} cycles"


def _repeated(rank: int, size: int) -> list[bool]:
    states = [hvd.is_initialized()]
    for call in (hvd.init, hvd.init, hvd.shutdown, hvd.shutdown, hvd.init):
        call()
        states.append(hvd.is_initialized())
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    return states


def test_init_and_shutdown_may_be_repeated():
    assert run_ranks(_repeated, 2) == [[False, True, True, False, False, True]] * 2


def _leave_at_once(rank: int, size: int) -> float:
    """Rank 1 takes the last step and shuts down while rank 0 is about to look at its state."""
    hvd.init()
    transport: Any = runtime.channel(0).transport
    other = transport._control[1 - rank]
    look = SteppedTransport._check_states

    def look_when_it_has_left(self: SteppedTransport, *arguments: Any) -> None:
        _await(lambda: other[steps.STATE] != 0)
        look(self, *arguments)

    if rank == 0:
        SteppedTransport._check_states = look_when_it_has_left  # type: ignore[method-assign]
    else:
        _await(lambda: other[steps._SLEEPING] != 0)
    total = hvd.allreduce(torch.ones(1), name="last", op=hvd.Sum).item()
    hvd.shutdown()
    return total


def _await(condition: Callable[[], bool], patience: float = 100) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_rank_may_leave_as_soon_as_it_has_its_result():
    assert run_ranks(_leave_at_once, 2) == [2, 2]
