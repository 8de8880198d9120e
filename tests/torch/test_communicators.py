"""init() with mpi4py communicators, under a real mpirun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mpi4py")

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun")

SPLIT = """
import json
import torch
from mpi4py import MPI
import horovod.torch as hvd

world = MPI.COMM_WORLD
half = hvd.ProcessSet(world.Split(color=world.rank % 2, key=world.rank))
before = half.ranks, half.included(), half.size()
try:
    hvd.init(process_sets=[half])
    refused = "accepted"
except NotImplementedError:
    refused = "refused"
hvd.init(comm=world, process_sets=[half])
seen = {
    "refused": refused,
    "before": before,
    "place": [hvd.rank(), hvd.size()],
    "same": hvd.global_process_set.mpi_comm is world,
    "half": [half.process_set_id, half.ranks, half.rank()],
    "registered": sorted(hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items()),
    "sums": [
        float(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=ps))
        for ps in (half, hvd.global_process_set)
    ],
}
another = hvd.ProcessSet(world.Split(color=world.rank // 2, key=world.rank))
try:
    hvd.init(comm=world, process_sets=[another, hvd.ProcessSet(world)])
except ValueError as error:
    seen["duplicate"] = "process_sets[1]" in str(error) and hvd.is_initialized()
seen["after"] = sorted(hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items())
everything = hvd.allgather_object(seen)
if hvd.rank() == 0:
    print(json.dumps(everything))
"""


@needs_mpirun
def test_process_sets_made_of_communicators():
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [MPIRUN, "--oversubscribe", "-np", "3", sys.executable, "-c", SPLIT],
        env=os.environ | root | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ranks: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for rank, seen in enumerate(ranks):
        members = [0, 2] if rank % 2 == 0 else [1]
        assert seen == {
            "refused": "refused",
            "before": [None, None, None],
            "place": [rank, 3],
            "same": True,
            "half": [1 + rank % 2, members, rank // 2],
            "registered": [[0, [0, 1, 2]], [1, [0, 2]], [2, [1]]],
            "sums": [float(len(members)), 3.0],
            "duplicate": True,
            "after": [[0, [0, 1, 2]], [1, [0, 2]], [2, [1]]],
        }
