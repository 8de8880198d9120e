"""A program that a rank starts is no rank, and is told so at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import horovod
import horovod.torch as hvd
from horovod.common.inherited import MARK, check_not_inherited, mark_process
from tests.ranks import run_ranks

OF_HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
    "_HOROVOD_SECRET_KEY": "c2VjcmV0",
}
OF_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-1",
}
PARENT = 1  # lives as long as we do


@pytest.mark.parametrize("launcher", [OF_HOROVODRUN, OF_MPIRUN], ids=["horovodrun", "mpirun"])
def test_the_mark_of_another_process_is_respected(launcher: dict[str, str]):
    environ = dict(launcher)
    mark_process(2, environ)
    check_not_inherited(environ)  # our own
    _, place = environ[MARK].split(" ", 1)
    inherited = {**environ, MARK: f"{PARENT} {place}"}
    with pytest.raises(ValueError, match=f"rank 1 of this job is process {PARENT} already"):
        check_not_inherited(inherited)
    check_not_inherited({**inherited, MARK: f"{2**22 + 1} {place}"})  # nobody lives there
    other = {name: value.replace("4711", "4712") for name, value in inherited.items()}
    other["PMIX_NAMESPACE"] = "prterun-2"
    other[MARK] = inherited[MARK]
    check_not_inherited(other)  # a job of its own
    assert horovod.clean_environment(inherited) == {}


def test_knobs_and_everything_else_stay():
    environ = {"HOROVOD_FUSION_THRESHOLD": "1", "PATH": "/bin", "SLURM_JOB_ID": "7"}
    assert horovod.clean_environment({**environ, **OF_HOROVODRUN}) == environ


PROGRAM = """
import horovod.torch as hvd
hvd.init()
print("of", hvd.size())
"""


def _start_programs(rank: int, size: int) -> tuple[str, str]:
    hvd.init()
    command = [sys.executable, "-c", PROGRAM]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    own = subprocess.run(
        command, capture_output=True, text=True, check=True, env=horovod.clean_environment()
    )
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    return child.stderr, own.stdout


def test_a_subprocess_that_calls_init():
    for rank, (refused, alone) in enumerate(run_ranks(_start_programs, 2)):
        assert f"ValueError: rank {rank} of this job is process " in refused
        assert "horovod.clean_environment()" in refused
        assert alone == "of 1\n"
