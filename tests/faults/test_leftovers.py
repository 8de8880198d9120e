"""A crash leaves nothing behind, and an idle job costs nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import horovod.torch as hvd
from tests.faults import TRANSPORTS
from tests.faults.leftovers import (
    descendants,
    files_in,
    named_shared_memory,
    private_temporary_folder,
    still_running,
)
from tests.ranks import run_ranks, start_ranks, tell


def _work_on(rank: int, size: int) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(1_000_000), name="first")
    tell("in place")
    while True:
        hvd.allreduce(torch.ones(100_000), name="again")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_job_that_is_killed_leaves_nothing(transport: str):
    with private_temporary_folder() as folder:
        env = TRANSPORTS[transport] | {"TMPDIR": folder}
        with start_ranks(_work_on, 2, env=env) as ranks:
            for rank in range(2):
                ranks.heard(rank)
            # Looked at while it runs: what is not there cannot be left by any crash.
            assert not named_shared_memory(ranks.pids)
            assert not files_in(folder)
            processes = descendants(ranks)
            for rank in range(2):
                ranks.signal(rank, signal.SIGKILL)
            assert not still_running(processes)
        assert not files_in(folder)


def _crash_while_starting(rank: int, size: int) -> None:
    if rank == 1:
        tell("in place")
        signal.pause()
    tell("in place")
    hvd.init()  # waits for rank 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_job_that_is_killed_while_starting_leaves_nothing(transport: str):
    with private_temporary_folder() as folder:
        env = TRANSPORTS[transport] | {"TMPDIR": folder}
        with start_ranks(_crash_while_starting, 2, env=env) as ranks:
            for rank in range(2):
                ranks.heard(rank)
            ranks.wait_until_blocked(0)
            for rank in range(2):
                ranks.signal(rank, signal.SIGKILL)
            ranks.wait()
        assert not files_in(folder)


def _exit_without_shutdown(rank: int, size: int) -> None:
    hvd.init()
    hvd.allreduce_async(torch.ones(1), name=f"only on {rank}")  # forgotten, never matched


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_script_may_end_without_shutdown(transport: str):
    assert run_ranks(_exit_without_shutdown, 2, env=TRANSPORTS[transport]) == [None, None]


def _trace_and_die(rank: int, size: int) -> None:
    hvd.init()
    for step in range(20):
        hvd.allreduce(torch.ones(10), name=f"step {step}")
    tell("in place")
    while True:
        hvd.allreduce(torch.ones(10), name="again")


def test_the_timeline_of_a_killed_rank_can_be_loaded(tmp_path: Path):
    path = tmp_path / "trace.json"
    with start_ranks(_trace_and_die, 2, env={"HOROVOD_TIMELINE": str(path)}) as ranks:
        for rank in range(2):
            ranks.heard(rank)
        for rank in range(2):
            ranks.signal(rank, signal.SIGKILL)
        ranks.wait()
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        events = json.loads(file.read_text())
        titles = [e for e in events if e.get("name") == "process_name" and e["pid"]]
        names = {e["args"]["name"] for e in titles}
        assert any("step 19" in name for name in names)
        phases = {e.get("name") for e in events}
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= phases


IDLE = 0.020  # seconds of the processor in two seconds


def _idle(rank: int, size: int) -> float:
    hvd.init()
    hvd.allreduce(torch.ones(1000), name="x")
    handle = hvd.allreduce_async(torch.ones(1000), name="y")
    hvd.synchronize(handle)
    hvd.barrier()
    for _ in range(5):  # on a busy machine a thread may have been held up in what it did before
        used = time.process_time()
        time.sleep(2)
        used = time.process_time() - used
        if used < IDLE:
            break
    return used


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_idle_process_uses_no_processor_time(transport: str):
    for used in run_ranks(_idle, 2, env=TRANSPORTS[transport]):
        assert used < IDLE


def _wait_long(rank: int, size: int) -> float:
    hvd.init()
    hvd.barrier()
    used = time.process_time()
    if rank == 1:
        time.sleep(2)
    hvd.allreduce(torch.ones(1000), name="late on rank 1")
    return time.process_time() - used


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_waiting_for_a_late_rank_uses_little_processor_time(transport: str):
    for used in run_ranks(_wait_long, 2, env=TRANSPORTS[transport]):
        assert used < 0.25


def _gigantic(rank: int, size: int) -> tuple[float, float, float]:
    elements = 9 * (1 << 30) // 16  # more bytes than 31 bits can count
    tensor = torch.full((elements,), rank + 1.0)
    tensor[-1] = 10 * (rank + 1.0)
    hvd.init()
    hvd.allreduce_(tensor, name="gigantic", op=hvd.Sum)
    return tensor[0].item(), tensor[elements // 2].item(), tensor[-1].item()


@pytest.mark.skipif(
    os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 14 << 30,
    reason="needs 14 GiB of memory",
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_tensor_of_more_than_two_gibibytes(transport: str):
    assert run_ranks(_gigantic, 2, env=TRANSPORTS[transport], timeout=240) == [(3, 3, 30)] * 2
