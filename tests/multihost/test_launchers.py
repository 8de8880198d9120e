"""Ranks of several hosts meet under the variables of every launcher that spans hosts.

The launchers themselves are not needed: their variables are, and what they offer to meet through
(an address of rank 0's host, or a home directory that the hosts share).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.common.topology import Slot
from horovod.common.wire import encode_key, new_key
from tests.hosts import Hosts, host_address, host_name, host_of
from tests.ranks import listen, tell

PORT = "29400"
KEY = encode_key(new_key())
COUNTS = [2, 1]


def _torchrun(slot: Slot) -> dict[str, str]:
    return {
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "GROUP_RANK": str(host_of(slot)),
        "GROUP_WORLD_SIZE": str(len(COUNTS)),
        "MASTER_ADDR": host_name(0),
        "MASTER_PORT": PORT,
    }


def _kubeflow(slot: Slot) -> dict[str, str]:
    return {
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.size),
        "MASTER_ADDR": host_address(0),
        "MASTER_PORT": PORT,
    }


def _open_mpi(slot: Slot) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(slot.rank),
        "OMPI_COMM_WORLD_SIZE": str(slot.size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(slot.local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(slot.local_size),
        "MASTER_ADDR": host_name(0),
        "MASTER_PORT": PORT,
        "_HOROVOD_SECRET_KEY": KEY,
    }


def _hydra(slot: Slot) -> dict[str, str]:
    return {
        "PMI_RANK": str(slot.rank),
        "PMI_SIZE": str(slot.size),
        "MPI_LOCALRANKID": str(slot.local_rank),
        "MPI_LOCALNRANKS": str(slot.local_size),
        "MASTER_ADDR": host_address(0),
        "MASTER_PORT": PORT,
        "_HOROVOD_SECRET_KEY": KEY,
    }


def _slurm(slot: Slot) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(slot.rank),
        "SLURM_NTASKS": str(slot.size),
        "SLURM_LOCALID": str(slot.local_rank),
        "SLURM_NODEID": str(host_of(slot)),
        "SLURM_TASKS_PER_NODE": ",".join(map(str, COUNTS)),
    }


def _by_hand(slot: Slot) -> dict[str, str]:
    return {
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "MASTER_ADDR": host_name(0),
        "MASTER_PORT": PORT,
        "_HOROVOD_SECRET_KEY": KEY,
    }


def _meet_twice(rank: int, size: int) -> list[tuple[Any, ...]]:
    """The second time they know each other, and the store is the one of the first."""
    seen = []
    for _ in range(2):
        hvd.init()
        total = hvd.allreduce(torch.tensor([rank + 1]), op=hvd.Sum).item()
        local, cross = (hvd.local_rank(), hvd.local_size()), (hvd.cross_rank(), hvd.cross_size())
        seen.append((hvd.rank(), hvd.size(), local, cross, total))
        hvd.shutdown()
    tell("met")
    listen()  # rank 0 serves the store, so it leaves last, as a script that ends in a barrier
    return seen


@pytest.mark.parametrize("launcher", [_torchrun, _open_mpi, _hydra, _slurm, _by_hand])
def test_ranks_of_several_hosts_meet(hosts: Hosts, launcher, tmp_path: Path):
    places = [((0, 2), (0, 2)), ((1, 2), (0, 1)), ((0, 1), (1, 2))]  # local, cross
    _check(hosts, launcher, COUNTS, places, {"HOME": str(tmp_path)})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_one_process_for_each_host(hosts: Hosts):
    _check(hosts, _kubeflow, [1, 1, 1], [((0, 1), (rank, 3)) for rank in range(3)], {})


def _check(
    hosts: Hosts,
    launcher,
    counts: list[int],
    places: list[tuple[tuple[int, int], tuple[int, int]]],
    env: Mapping[str, str],
) -> None:
    with hosts.start(_meet_twice, counts, env=env, launcher=launcher) as ranks:
        for rank in range(3):
            assert ranks.heard(rank) == "met"
        ranks.say()
        assert ranks.results() == [[(rank, 3, *place, 6)] * 2 for rank, place in enumerate(places)]


def _nobody_home(rank: int, size: int) -> str:
    if rank == 0:
        listen()  # never calls init
        return ""
    with pytest.raises((TimeoutError, ConnectionError)) as caught:
        hvd.init()
    tell("raised")
    return str(caught.value)


@pytest.mark.parametrize("launcher", [_torchrun, _open_mpi, _slurm])
def test_rank_0_on_another_host_does_not_come(hosts: Hosts, launcher, tmp_path: Path):
    env = {"HOME": str(tmp_path), "HOROVOD_START_TIMEOUT": "1"}
    with hosts.start(_nobody_home, COUNTS, env=env, launcher=launcher) as ranks:
        for rank in (1, 2):
            assert ranks.heard(rank) == "raised"
        ranks.say()
        for rank, message in enumerate(ranks.results()[1:], 1):
            assert f"rank {rank} of 3" in message
