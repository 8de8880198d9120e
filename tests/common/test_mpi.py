"""MPI in this process: initialising it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PATH": f"{BIN}:/usr/bin:/bin",
}

PROGRAM = """
import os, sys, threading, time
from pathlib import Path
from horovod.common import mpi

folder = Path(sys.argv[1])
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    def answer():
        while not (folder / "question").exists():
            time.sleep(0.01)
        (folder / "answer").touch()
    threading.Thread(target=answer, daemon=True).start()
    (folder / "begun").touch()
else:
    def wait_for(name):
        deadline = time.monotonic() + 200
        while not (folder / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.01)
    wait_for("begun")
    time.sleep(0.5)  # rank 0 is on its way into MPI_Init_thread: most likely there by now
    (folder / "question").touch()
    wait_for("answer")
print(mpi.initialise().COMM_WORLD.size)
"""


@pytest.mark.skipif(shutil.which("mpirun", path=str(BIN)) is None, reason="there is no mpirun")
def test_other_threads_run_while_mpi_waits_for_the_other_ranks(tmp_path: Path):
    """One of them serves the store, which the other ranks may need to get there themselves."""
    command = ["mpirun", "-np", "2", sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, **MPI}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]
