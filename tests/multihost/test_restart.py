"""Shutting down and starting again over several hosts costs nothing that stays."""

from __future__ import annotations

import os
import threading

import torch

import horovod.torch as hvd
from tests.hosts import Hosts

CYCLES = 8
SETTLED = 2  # cycles after which what is made once has been made


def _holdings() -> dict[str, int]:
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for line in maps if "memfd:" in line)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "shared mappings": mappings,
    }


def _cycles(rank: int, size: int) -> tuple[dict[str, int], dict[str, int]]:
    settled: dict[str, int] = {}
    for cycle in range(CYCLES):
        hvd.init()
        total = hvd.allreduce(torch.full((30_000,), float(cycle)), name="a", op=hvd.Sum)
        assert total[0].item() == cycle * size
        handles = [hvd.allreduce_async(torch.ones(10), name=f"b{i}") for i in range(3)]
        assert all(hvd.synchronize(handle)[0].item() == 1 for handle in handles)
        hvd.shutdown()
        if cycle == SETTLED:
            settled = _holdings()
    return settled, _holdings()


def test_cycles_of_init_and_shutdown(hosts: Hosts):
    for settled, final in hosts.run(_cycles, [2, 1]):
        assert final == settled


def _come_and_go(rank: int, size: int) -> int:
    """Nothing keeps the ranks in step: one may leave while another still connects to it."""
    for _ in range(15):
        hvd.init()
        hvd.shutdown()
    hvd.init()
    return int(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())


def test_a_rank_may_leave_as_soon_as_it_has_come(hosts: Hosts):
    assert hosts.run(_come_and_go, [1, 1, 1]) == [3, 3, 3]
