"""The same script under every launcher that is here.

Each launcher starts ranks once as users do; those of the other tests are forked, which takes less
time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_python import forked_python
from tests.ranks import clean_environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys, torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), name="x", op=hvd.Sum).item()
place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), total]
with open(f"{sys.argv[1]}/{hvd.rank()}", "w") as file:
    json.dump(place, file)
hvd.shutdown()
"""

OPEN_MPI = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
LAUNCHERS = {
    "horovodrun": [sys.executable, "-m", "horovod.runner", "-np", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "mpirun": [*OPEN_MPI, sys.executable],
}


def _run(command: list[str], tmp_path: Path, env: dict[str, str]) -> list[list[float]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    results = tmp_path / "results"
    results.mkdir()
    done = _start([*command, str(script), str(results)], tmp_path, env)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in sorted(results.iterdir())]


def _start(
    command: list[str], tmp_path: Path, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    # The launchers of the environment the tests run in come first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environ = clean_environment() | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = shutil.which(command[0], path=path)
    assert program, f"{command[0]} is not installed"
    return subprocess.run(
        [program, *command[1:]],
        env=environ | env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_find_each_other(launcher: str, tmp_path: Path):
    assert _run(LAUNCHERS[launcher], tmp_path, {}) == [[0, 2, 0, 2, 3.0], [1, 2, 1, 2, 3.0]]


def test_without_a_launcher_there_is_one_rank(tmp_path: Path):
    assert _run([sys.executable], tmp_path, {}) == [[0, 1, 0, 1, 1.0]]


def test_mpi_moves_the_bytes_where_asked_to(tmp_path: Path):
    env = {"HOROVOD_CPU_OPERATIONS": "mpi"}
    command = [*OPEN_MPI, *forked_python()]
    assert _run(command, tmp_path, env) == [[0, 2, 0, 2, 3.0], [1, 2, 1, 2, 3.0]]


ASKS_FOR_MPI = """
import sys
told_not_to = sys.argv[2] == "deferred"
if told_not_to:
    import mpi4py
    mpi4py.rc.initialize = False
import horovod.torch as hvd
assert not hvd.mpi_enabled()
hvd.init()
assert hvd.mpi_enabled() is True and hvd.gloo_enabled() is False and hvd.mpi_built()
if not told_not_to:
    assert hvd.mpi_threads_supported() in (True, False)
from mpi4py import MPI
assert MPI.Is_initialized()
assert hvd.mpi_threads_supported() is (MPI.Query_thread() == MPI.THREAD_MULTIPLE)
assert (hvd.rank(), hvd.size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
assert MPI.COMM_WORLD.allreduce(hvd.rank() + 1) == 3
"""


@pytest.mark.parametrize(("launcher", "way"), [("mpirun", "deferred"), ("horovodrun", "lazy")])
def test_a_job_that_mpi_started_has_mpi(launcher: str, way: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(ASKS_FOR_MPI)
    horovodrun = [sys.executable, "-m", "horovod.runner", "-np", "2", "--mpi"]
    command = OPEN_MPI if launcher == "mpirun" else horovodrun
    done = _start([*command, *forked_python(), str(script), "", way], tmp_path, {})
    assert done.returncode == 0, done.stdout + done.stderr
