"""A rank fails while the others wait for it: the job names it, not one of the others."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import horovod
from tests.runner.jobs import environment, run_python

BIN = Path(sys.executable).parent

LOSING_RANK_1 = """
import atexit, sys, time

if sys.argv[2:] == ["late"]:
    # Runs after Horovod was shut down, when the others have failed and begin to end.
    atexit.register(time.sleep, 1.0)

import torch
import horovod.torch as hvd

hvd.init()
for _ in range(3):
    hvd.allreduce(torch.ones(4), name="together")
if hvd.rank() == 1:
    if sys.argv[1] == "raise":
        raise ValueError("the reason of it all")
    sys.exit(int(sys.argv[1]))
atexit.unregister(time.sleep)
hvd.allreduce(torch.ones(4), name="without rank 1")
"""


def test_over_shared_memory():
    done = run_python(3, LOSING_RANK_1, "raise", "late")
    assert done.returncode == 1, done.stderr
    assert re.search(r"first to fail was:\n\n.*\n  1  ", done.stderr), done.stderr
    assert "  ValueError: the reason of it all\n" in done.stderr
    assert "failed because of it (0,2)." in done.stderr


def test_over_tcp():
    env = {"HOROVOD_CPU_OPERATIONS": "gloo"}
    done = run_python(2, LOSING_RANK_1, "3", "late", env=env)
    assert done.returncode == 3, done.stderr
    assert re.search(r"first to fail was:\n\n.*\n  1  .*exit code 3\n", done.stderr), done.stderr


def test_a_rank_that_ends_well_too_early():
    done = run_python(2, LOSING_RANK_1, "0")
    assert done.returncode == 1, done.stderr
    assert re.search(r"The cause was:\n\n.*\n  1  .*exit code 0, while", done.stderr), done.stderr
    assert "PeerLostError: rank 1 has shut down Horovod" in done.stderr


def test_in_an_elastic_job_that_does_not_recover():
    options = ["-H", "localhost:2", "--min-np", "2"]
    done = run_python(2, LOSING_RANK_1, "raise", "late", options=options)
    assert done.returncode == 1, done.stderr
    assert re.search(r"first to fail was:\n\n.*\n  1  ", done.stderr), done.stderr
    assert "  ValueError: the reason of it all\n" in done.stderr


@pytest.mark.skipif(shutil.which("mpirun", path=str(BIN)) is None, reason="there is no mpirun")
def test_under_mpirun():
    done = subprocess.run(
        [str(BIN / "mpirun"), "-np", "2", sys.executable, "-c", LOSING_RANK_1, "3", "late"],
        env=environment(
            {
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            }
        ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert re.search(r"Process name: \[.*,1\]", done.stdout + done.stderr)


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
        horovod.run(_lose_rank_1, num_proc=2)
