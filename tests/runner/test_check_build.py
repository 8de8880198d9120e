"""``horovodrun --check-build`` says what works, and nothing else."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import horovod
from tests.runner.horovodrun import ROOT, run


def _entries(report: str) -> dict[str, tuple[str, str]]:
    """Box and detail of every entry."""
    found = {}
    for line in report.splitlines():
        if line.startswith("    ["):
            name, _, detail = line[8:].partition(" (")
            found[name] = (line[4:7], detail.removesuffix(")"))
    return found


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
    entries = _entries(done.stdout)
    assert {box for box, _ in entries.values()} <= {"[X]", "[ ]"}
    assert list(entries) == [
        *("TensorFlow", "PyTorch", "Keras", "MXNet", "JAX"),
        *("MPI", "Gloo"),
        *("NCCL", "XCCL", "DDL", "CCL", "Shared memory"),
    ]
    assert entries["DDL"] == entries["CCL"] == ("[ ]", "")  # not part of this Horovod
    if importlib.util.find_spec("mpi4py"):
        import mpi4py

        assert entries["MPI"][0] == "[X]"
        assert entries["MPI"][1].endswith(f", mpi4py {mpi4py.__version__}")
    else:
        assert entries["MPI"] == ("[ ]", "")
    import torch

    assert entries["PyTorch"] == ("[X]", torch.__version__)
    assert entries["Gloo"] == ("[X]", "")
    assert (entries["NCCL"][0] == "[X]") == torch.cuda.is_available()
    if hasattr(os, "memfd_create"):
        assert entries["Shared memory"][0] == "[X]"
        assert entries["Shared memory"][1].startswith("memfd")


def test_broken_frameworks_are_survived_and_explained(tmp_path: Path):
    (tmp_path / "keras.py").write_text("print('noise')\nraise RuntimeError('made for numpy 7')\n")
    (tmp_path / "mxnet.py").write_text("import os\nos.abort()\n")
    (tmp_path / "jax.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "tensorflow.py").write_text("import a_missing_part\n")
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open')\n")
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.40: cannot open')\n")
    # Python must not hold back what is printed, whether or not the user has told it so.
    environ = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONUNBUFFERED": ""}
    done = run("--check-build", "--verbose", env=environ)
    assert done.returncode == 0, done.stderr
    said, _, report = done.stdout.partition("Horovod v")
    assert "noise" in said
    assert "Traceback" in said
    assert "Traceback" not in report
    entries = _entries(report)
    assert entries["Keras"] == ("[ ]", "RuntimeError: made for numpy 7")
    assert entries["MXNet"] == ("[ ]", "the check was ended by SIGABRT")
    assert entries["JAX"] == ("[ ]", "exit status 3")
    assert entries["TensorFlow"][0] == "[ ]"
    assert "No module named 'a_missing_part'" in entries["TensorFlow"][1]
    assert entries["MPI"] == ("[ ]", "ImportError: libmpi.so.40: cannot open")
    assert entries["PyTorch"] == ("[ ]", "OSError: libtorch_cpu.so: cannot open")
    assert entries["Gloo"] == ("[ ]", "")
