"""Forked children, such as DataLoader workers, never touch the engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd
from tests.faults import TRANSPORTS
from tests.ranks import run_ranks


def _total(value: float) -> float:
    return hvd.allreduce(torch.tensor([value]), name="total", op=hvd.Sum).item()


def _child_tries(rank: int, size: int) -> tuple[str, list[float]]:
    hvd.init()
    before = _total(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _total(1)
            message = "no error"
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writer, message.encode())
        os._exit(0)
    during = _total(2)
    os.waitpid(child, 0)
    message = os.read(reader, 4096).decode()
    return message, [before, during, _total(3)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_forked_child_gets_a_clear_error_and_disturbs_nobody(transport: str):
    for message, totals in run_ranks(_child_tries, 2, env=TRANSPORTS[transport]):
        assert message.startswith("HorovodInternalError"), message
        assert "fork" in message
        assert totals == [2, 4, 6]


def _facts(_worker: object = None) -> list[object]:
    return [
        hvd.is_initialized(),
        (hvd.rank(), hvd.size()),
        (hvd.local_rank(), hvd.local_size()),
        (hvd.cross_rank(), hvd.cross_size()),
        (hvd.mpi_enabled(), hvd.gloo_enabled()),
        (hvd.global_process_set.rank(), hvd.global_process_set.size()),
        hvd.global_process_set.included(),
        hvd.global_process_set.ranks,
    ]


class _FactsOfWorkers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[object]:
        return _facts()


def _ask_workers(rank: int, size: int) -> tuple[list[object], list[object]]:
    hvd.init()
    loader = DataLoader(
        _FactsOfWorkers(),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        worker_init_fn=_facts,
        collate_fn=lambda facts: facts,
    )
    return _facts(), list(loader)


def test_facts_are_known_in_data_loader_workers():
    for rank, (own, of_workers) in enumerate(run_ranks(_ask_workers, 2)):
        assert own[1] == (rank, 2)
        assert of_workers == [own, own]


def _child_leaves(rank: int, size: int, by: str) -> list[float]:
    hvd.init()
    totals = [_total(1)]
    child = os.fork()
    if child == 0:
        if by == "shutdown":
            hvd.shutdown()
            os._exit(0)
        sys.exit(0)  # through the exit handlers that the child inherited
    try:
        totals.append(_total(2))
    finally:
        _, status = os.waitpid(child, 0)
    assert status == 0
    return [*totals, _total(3)]


@pytest.mark.parametrize("by", ["shutdown", "exit"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_child_that_ends_ends_only_itself(transport: str, by: str):
    assert run_ranks(_child_leaves, 2, by, env=TRANSPORTS[transport]) == [[2, 4, 6]] * 2


def _train_with_workers(rank: int, size: int) -> list[float]:
    hvd.init()
    data = TensorDataset(torch.arange(32.0))
    totals = []
    for _ in range(2):
        loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
        for (batch,) in loader:
            totals.append(_total(batch.sum().item()))
    return totals


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_data_loader_workers_live_beside_collectives(transport: str):
    expected = [2.0 * sum(range(start, start + 8)) for start in (0, 8, 16, 24)] * 2
    assert run_ranks(_train_with_workers, 2, env=TRANSPORTS[transport]) == [expected] * 2


FORGETFUL = """
import atexit, os, sys
import horovod.torch as hvd

child = os.fork()
if child == 0:
    atexit._clear()
    hvd.init()
    atexit._run_exitfuncs()
    os._exit(hvd.is_initialized())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_has_forgotten_what_its_parent_registered_stops_the_engine():
    """As a process of multiprocessing has, in Python 3.13 and newer."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORGETFUL], check=True, timeout=280)
