"""Which transport is chosen, and that falling back is said aloud."""

from __future__ import annotations

import os

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.engine.runtime import runtime
from tests.ranks import run_ranks, start_ranks


def chosen() -> str:
    job = runtime._job
    assert job is not None
    return job.channels[0]._executor.transport.name


def use(rank: int, size: int) -> tuple[str, float]:
    hvd.init()
    result = chosen(), float(hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum))
    hvd.shutdown()
    return result


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "SHM"),
        ({"HOROVOD_CPU_OPERATIONS": "shm"}, "SHM"),
        ({"HOROVOD_CPU_OPERATIONS": "gloo"}, "TCP"),
        ({"HOROVOD_CPU_OPERATIONS": "CCL"}, "TCP"),
    ],
)
def test_the_environment_chooses(variables: dict[str, str], expected: str) -> None:
    assert run_ranks(use, 2, env=variables) == [(expected, 1.0)] * 2


def test_one_process_needs_nothing() -> None:
    assert run_ranks(use, 1) == [("SINGLE", 0.0)]


def without_memory_files(rank: int, size: int) -> tuple[str, float]:
    if rank == 1:

        def memfd_create(*_: object) -> int:
            raise OSError("this system has no memory files")

        os.memfd_create = memfd_create
    return use(rank, size)


def test_a_rank_that_cannot_share_memory_makes_all_fall_back_to_tcp_and_says_so() -> None:
    with start_ranks(without_memory_files, 2) as ranks:
        outcomes = ranks.wait()
    assert [outcome.result for outcome in outcomes] == [("TCP", 1.0)] * 2
    refusal = "no shared memory (rank 1: memfd_create: this system has no memory files)"
    assert refusal in outcomes[0].output


def insisting(rank: int, size: int) -> str:
    try:
        without_memory_files(rank, size)
    except (ValueError, HorovodInternalError) as error:
        return str(error)
    return ""


def test_asking_for_shared_memory_where_there_is_none_is_an_error() -> None:
    for message in run_ranks(insisting, 2, env={"HOROVOD_CPU_OPERATIONS": "shm"}):
        assert "HOROVOD_CPU_OPERATIONS=shm" in message
        assert "no memory files" in message


def reason(rank: int, size: int) -> None:
    hvd.init()
    hvd.shutdown()


def test_one_line_says_what_was_chosen_and_why() -> None:
    with start_ranks(reason, 2, env={"HOROVOD_LOG_LEVEL": "info"}) as ranks:
        outcomes = ranks.wait()
    lines = [line for o in outcomes for line in o.output.splitlines() if "CPU tensors" in line]
    assert len(lines) == 1
    assert "through SHM (all ranks on one host)" in lines[0]


def some_of_them(rank: int, size: int) -> tuple[int, int, float] | str:
    try:
        hvd.init(comm=[2, 0])
    except ValueError as error:
        return str(error)
    result = hvd.rank(), hvd.size(), float(hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum))
    hvd.shutdown()
    return result


def test_init_with_some_of_the_ranks() -> None:
    first, second, third = run_ranks(some_of_them, 3)
    assert first == (1, 2, 2.0)
    assert third == (0, 2, 2.0)
    assert "rank 1 is not in comm=[2, 0]" in second
