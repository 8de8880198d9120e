"""A rank fails while the others wait for it: the job names it, not one of the others.

One test starts ranks as users do; those of the others are forked, which takes less time.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

import horovod
from tests.faults.losing_rank import FILE, WAYS
from tests.forked_python import forked_python
from tests.runner.horovodrun import run

BIN = Path(sys.executable).parent
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}
CODES = {"raise": 1, "3": 3, "0": 1}

needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun", path=str(BIN)) is None, reason="there is no mpirun"
)


def check(code: int, stderr: str, way: str, *, late: bool) -> None:
    """The table names rank 1, and the exit code is its own; `late`: rank 0 has ended before it."""
    assert code == CODES[way], stderr
    if way == "0":
        assert re.search(r"The cause was:\n\n.*\n  1  .*exit code 0, while", stderr), stderr
        assert re.search("PeerLostError: rank 1.* has shut down Horovod", stderr), stderr
        return
    assert re.search(rf"first to fail was:\n\n.*\n  1  .*exit code {code}\n", stderr), stderr
    assert ("  ValueError: the reason of it all\n" in stderr) == (way == "raise")
    if late:  # how many others have come to their end by then depends on the machine
        assert re.search(r"other ranks? failed because of it \(0", stderr), stderr


def test_over_shared_memory(tmp_path: Path):
    done = run("-np", "3", sys.executable, FILE, "raise", str(tmp_path), patient=True)
    check(done.returncode, done.stderr, "raise", late=True)


def test_over_tcp(tmp_path: Path):
    env = {"HOROVOD_CPU_OPERATIONS": "gloo"}
    forked = [*forked_python(), FILE]
    done = run("-np", "3", *forked, "3", str(tmp_path), env=env, patient=True)
    check(done.returncode, done.stderr, "3", late=True)


def test_a_rank_that_ends_well_too_early():
    done = run("-np", "2", *forked_python(), FILE, "0", patient=True)
    check(done.returncode, done.stderr, "0", late=False)


@pytest.mark.parametrize("way", WAYS)
def test_over_shared_memory_inside_hosts_and_tcp_between_them(way: str, tmp_path: Path):
    hosts = ["-H", "localhost:2,127.0.0.1:2", "--log-level", "INFO"]
    forked = [*forked_python(), FILE]
    done = run("-np", "4", *hosts, *forked, way, str(tmp_path), patient=True)
    assert "HIERARCHICAL (2 hosts, SHM inside" in done.stdout
    check(done.returncode, done.stderr, way, late=True)


def test_in_an_elastic_job_that_does_not_recover(tmp_path: Path):
    forked = [*forked_python(), FILE]
    done = run("-np", "2", "-H", "localhost:2", "--min-np", "2", *forked, "raise", str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert re.search(r"first to fail was:\n\n.*\n  1  ", done.stderr), done.stderr
    assert "  ValueError: the reason of it all\n" in done.stderr


@needs_mpirun
def test_under_mpirun():
    env = {**MPI, "PATH": f"{BIN}:/usr/bin:/bin"}
    done = run("-np", "2", "--mpi", *forked_python(), FILE, "3", env=env)
    assert done.returncode == 3, done.stderr
    assert re.search(r"Process name: \[.*,1\]", done.stdout + done.stderr)


@needs_mpirun
@pytest.mark.parametrize("way", WAYS)
def test_over_mpi(way: str):
    """mpirun makes the report here. A rank in MPI_Finalize would wait for the others for ever."""
    env = {**MPI, "PATH": f"{BIN}:/usr/bin:/bin", "HOROVOD_CPU_OPERATIONS": "mpi"}
    done = run("-np", "3", "--mpi", *forked_python(), FILE, way, env=env)
    assert done.returncode == CODES[way], done.stderr
    said = done.stdout + done.stderr
    named = r"due to process rank 1 " if way == "0" else r"Process name: \[.*,1\]"
    assert re.search(named, said), said
    assert ("ValueError: the reason of it all" in said) == (way == "raise")
    if way != "raise":  # mpirun may have ended the others before they could say it
        # Two ranks say it at once, in pieces, which mpirun passes on as they come.
        assert "PeerLostError" in said
        assert "rank 1 has shut down Horovod" in said


@needs_mpirun
def test_over_mpi_rank_0_may_fail_too():
    env = {**MPI, "PATH": f"{BIN}:/usr/bin:/bin", "HOROVOD_CPU_OPERATIONS": "mpi"}
    program = """
import sys, torch, horovod.torch as hvd
for _ in range(2):
    hvd.shutdown()
    hvd.init()
    hvd.allreduce(torch.ones(4), name="together")
if hvd.rank() == 0:
    sys.exit(4)
hvd.allreduce(torch.ones(4), name="without rank 0")
"""
    done = run("-np", "2", "--mpi", *forked_python(), "-c", program, env=env)
    assert done.returncode == 4, done.stderr
    assert re.search(r"Process name: \[.*,0\]", done.stdout + done.stderr)


def _lose_rank_1() -> None:
    import torch

    import horovod.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(4), name="together")
    if hvd.rank() == 1:
        raise ValueError("the reason of it all")
    hvd.allreduce(torch.ones(4), name="without rank 1")


def test_of_a_function():
    with pytest.raises(ValueError, match="the reason of it all"):
        horovod.run(_lose_rank_1, num_proc=2, executable=forked_python()[0])
