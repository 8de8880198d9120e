"""``horovodrun --check-build`` says what works, and nothing else."""

from __future__ import annotations

import importlib.util

import horovod
from tests.runner.jobs import run


def test_the_report():
    done = run("--check-build")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"Horovod v{horovod.__version__}:"
    titles = [line for line in lines[1:] if line and not line.startswith(" ")]
    assert titles == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
    ]
    boxes = {line[8:]: line[4:7] for line in lines if line.startswith("    [")}
    assert set(boxes.values()) <= {"[X]", "[ ]"}
    assert {"TensorFlow", "PyTorch", "MXNet", "MPI", "Gloo", "NCCL", "DDL", "CCL"} <= set(boxes)
    assert boxes["DDL"] == boxes["CCL"] == "[ ]"  # not part of this Horovod
    mpi = importlib.util.find_spec("mpi4py") is not None
    assert boxes["MPI"] == ("[X]" if mpi else "[ ]")
    usable = all(importlib.util.find_spec(name) for name in ("torch", "horovod.torch"))
    assert boxes["PyTorch"] == boxes["Gloo"] == ("[X]" if usable else "[ ]")
    missing = importlib.util.find_spec("tensorflow") is None
    assert not missing or boxes["TensorFlow"] == "[ ]"


def test_verbose_says_why_something_is_missing():
    done = run("--check-build", "--verbose")
    assert "Horovod v" in done.stdout
    before, _, _ = done.stdout.partition("Horovod v")
    missing = [name for name in ("mxnet", "tensorflow") if importlib.util.find_spec(name) is None]
    assert all(f"No module named '{name}'" in before for name in missing)
