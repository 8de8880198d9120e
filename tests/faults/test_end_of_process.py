"""A process ends in order although one of our threads is in the middle of an operation."""

from __future__ import annotations

import subprocess
import sys

from tests.ranks import clean_environment
from tests.runner.horovodrun import ROOT

# Shutting down gives up waiting for the background thread at once, as after many seconds on a busy
# machine. The thread goes on for a second or two, and gets to know only then that all is over.
PROGRAM = """
import threading, time
import torch
import horovod.torch as hvd
from horovod.engine import channel
from horovod.engine.execution.executor import Executor

channel._LONGEST_GOODBYE = 0.01
begun = threading.Event()
matrix = torch.ones(300, 300)

def compute(self, batch):
    begun.set()
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        matrix.mm(matrix)
    print("done", flush=True)

Executor.run = compute
hvd.init()
hvd.allgather_async(torch.ones(4), name="x")
begun.wait()
"""


def test_python_does_not_end_under_a_background_thread():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**clean_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "terminate called" not in done.stderr
