"""Ranks know on which of several hosts they are, and process sets know theirs."""

from __future__ import annotations

import re

import pytest
import torch

import horovod.torch as hvd
from tests.hosts import Hosts


def _place(rank: int, size: int) -> tuple[int, ...]:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    homogeneous = hvd.mpi_ops._basics.is_homogeneous()
    return hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), homogeneous


@pytest.mark.parametrize(
    ("ranks_per_host", "expected"),
    [
        ([2, 2], [(0, 2, 0, 2, 1), (1, 2, 0, 2, 1), (0, 2, 1, 2, 1), (1, 2, 1, 2, 1)]),
        ([2, 1], [(0, 2, 0, 2, 0), (1, 2, 0, 1, 0), (0, 1, 1, 2, 0)]),
        ([1, 1, 1], [(0, 1, 0, 3, 1), (0, 1, 1, 3, 1), (0, 1, 2, 3, 1)]),
    ],
)
def test_places(hosts: Hosts, ranks_per_host: list[int], expected: list[tuple[int, ...]]):
    assert hosts.run(_place, ranks_per_host) == expected


SETS = {"one host": [0, 1], "other host": [2, 3], "across": [1, 2], "uneven": [0, 1, 3]}
TRANSPORTS = {
    "one host": r"SHM \(all ranks on one host",
    "other host": r"SHM \(all ranks on one host",
    "across": r"TCP \(2 hosts with one rank each",
    "uneven": r"HIERARCHICAL \(2 hosts, SHM inside",
}


def _use(ranks: list[int], process_set: hvd.ProcessSet, rank: int) -> None:
    value = torch.full((40_000,), float(rank))
    total = hvd.allreduce(value, name=f"sum {ranks}", op=hvd.Sum, process_set=process_set)
    assert total.unique().tolist() == [sum(ranks)]
    gathered = hvd.allgather(value[: rank + 1], name=f"all {ranks}", process_set=process_set)
    assert gathered.tolist() == [float(r) for r in ranks for _ in range(r + 1)]
    received = hvd.broadcast(value, ranks[-1], name=f"from {ranks}", process_set=process_set)
    assert received.unique().tolist() == [ranks[-1]]
    hvd.barrier(process_set=process_set)


def _process_sets(rank: int, size: int, dynamic: bool) -> None:
    sets = {name: hvd.ProcessSet(ranks) for name, ranks in SETS.items()}
    if dynamic:
        hvd.init()
        for process_set in sets.values():
            hvd.add_process_set(process_set)
    else:
        hvd.init(process_sets=list(sets.values()))
    for name, process_set in sets.items():
        if process_set.included():
            _use(SETS[name], process_set, rank)
    world = hvd.allreduce(torch.ones(1), name="world", op=hvd.Sum)
    assert world.item() == size
    if dynamic:
        for process_set in sets.values():
            assert hvd.remove_process_set(process_set)
        assert hvd.allreduce(torch.ones(1), name="world", op=hvd.Sum).item() == size


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_process_sets(hosts: Hosts, dynamic: bool):
    env = {"HOROVOD_LOG_LEVEL": "info", "HOROVOD_DYNAMIC_PROCESS_SETS": str(int(dynamic))}
    with hosts.start(_process_sets, [2, 2], dynamic, env=env) as ranks:
        ranks.results()
        for number, (name, members) in enumerate(SETS.items(), 1):
            said = rf"process set {number}: CPU tensors through {TRANSPORTS[name]}"
            assert re.search(said, ranks.output(members[0])), ranks.output(members[0])
