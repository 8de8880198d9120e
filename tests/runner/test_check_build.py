"""``horovodrun --check-build`` says what works, and nothing else."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import horovod
from horovod.runner import check_build as build
from tests.runner.horovodrun import ROOT, run

# Stands for a PyTorch that is built for CUDA, where two GPUs answer.
CUDA_TORCH = """
import os, signal, subprocess, sys, types
from pathlib import Path

def module(name, **contents):
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(contents)
    return made

def fail(message):
    raise RuntimeError(message)

__path__ = []
__version__ = "2.99.0+cu130"
version = types.SimpleNamespace(cuda="13.0", hip=None)
distributed = module(
    "torch.distributed", is_available=lambda: True, is_nccl_available=lambda: True
)
cuda = module(
    "torch.cuda",
    init=lambda: None,
    device_count=lambda: 2,
    get_device_properties=lambda index: types.SimpleNamespace(
        name="NVIDIA Stand-in", total_memory=3 << (30 + index)
    ),
    nccl=types.SimpleNamespace(version=lambda: (2, 28, 9)),
)
"""
# Keeps the pipe open when it is killed, as a process does that hangs in the kernel.
HANGING_DRIVER = """
def wait_for_a_device():
    child = subprocess.Popen(["sleep", "60"])
    Path(os.environ["CHILD_FILE"]).write_text(str(child.pid))
    signal.pause()

cuda.init = wait_for_a_device
"""


def _entries(report: str) -> dict[str, tuple[str, str]]:
    """Box and detail of every entry."""
    found = {}
    for line in report.splitlines():
        if line.startswith("    ["):
            name, _, detail = line[8:].partition(" (")
            found[name] = (line[4:7], detail.removesuffix(")"))
    return found


def _devices(report: str) -> list[str]:
    """The lines of the last section."""
    return [line.strip() for line in report.partition("Available Devices:\n")[2].splitlines()]


@pytest.fixture
def report_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The report about devices where PyTorch is the stand-in, with changes to it."""

    def make(changes: str = "", limit: float = 200.0) -> str:
        (tmp_path / "torch.py").write_text(CUDA_TORCH + changes)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # the file changes within a second
        probe = next(probe for probe in build._PROBES if probe.name == "Devices")
        monkeypatch.setattr(build, "_PROBES", (dataclasses.replace(probe, limit=limit),))
        return build.check_build()

    return make


@pytest.fixture(scope="module")
def report() -> str:
    """The report of this machine."""
    done = run("--check-build")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_report(report: str):
    lines = report.splitlines()
    assert lines[0] == f"Horovod v{horovod.__version__}:"
    titles = [line for line in lines[1:] if line and not line.startswith(" ")]
    assert titles == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
        "Available Clusters:",
        "Available Tools:",
        "Available Devices:",
    ]
    entries = _entries(report)
    assert {box for box, _ in entries.values()} <= {"[X]", "[ ]"}
    assert list(entries) == [
        *("TensorFlow", "PyTorch", "Keras", "MXNet", "JAX", "Lightning"),
        *("MPI", "Gloo"),
        *("NCCL", "XCCL", "DDL", "CCL", "Shared memory"),
        *("Spark", "Ray", "Dashboard"),
    ]
    modules = {"Lightning": "lightning", "Spark": "pyspark", "Ray": "ray", "Dashboard": "aiohttp"}
    for name, module in modules.items():
        if importlib.util.find_spec(module) is None:
            assert entries[name] == ("[ ]", "")
        elif name != "Spark" or shutil.which("java"):
            version = importlib.metadata.version(module)
            assert entries[name][0] == "[X]"
            assert entries[name][1].endswith(version)
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


def test_a_machine_without_devices(report: str):
    import torch

    if torch.version.cuda or torch.version.hip:
        hidden = run("--check-build", env={"CUDA_VISIBLE_DEVICES": ""}).stdout
        assert _devices(hidden)[0].startswith("none: ")
        assert _entries(hidden)["NCCL"] == ("[ ]", "")
    elif not getattr(torch.version, "xpu", None):
        reason = f"none: PyTorch {torch.__version__} is built for CPUs only"
        assert _devices(report) == [reason]


def test_the_devices_of_this_machine(report: str):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there are none")
    found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    version = ".".join(map(str, torch.cuda.nccl.version()))
    assert _devices(report) == [
        *(
            f"cuda:{index}: {device.name}, {device.total_memory / 2**30:.1f} GiB"
            for index, device in enumerate(found)
        ),
        f"NCCL {version} can be loaded",
    ]
    assert _entries(report)["NCCL"] == ("[X]", version)


def test_devices_and_nccl(report_with: Callable[..., str]):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there are real ones")
    report = report_with()
    assert _devices(report) == [
        "cuda:0: NVIDIA Stand-in, 3.0 GiB",
        "cuda:1: NVIDIA Stand-in, 6.0 GiB",
        "NCCL 2.28.9 can be loaded",
    ]
    assert _entries(report)["NCCL"] == ("[X]", "2.28.9")


def test_a_device_that_does_not_work_is_named(report_with: Callable[..., str]):
    broken = """
sound = cuda.get_device_properties
cuda.get_device_properties = lambda n: sound(n) if n else fail("CUDA error: unknown error")
"""
    assert _devices(report_with(broken))[:2] == [
        "cuda:0 cannot be used: CUDA error: unknown error",
        "cuda:1: NVIDIA Stand-in, 6.0 GiB",
    ]


def test_a_broken_driver_is_explained_in_one_line(report_with: Callable[..., str]):
    report = report_with("cuda.init = lambda: fail('The driver is too old.\\nUpdate it.')\n")
    assert _devices(report) == ["none: The driver is too old.", "NCCL 2.28.9 can be loaded"]
    assert _entries(report)["NCCL"] == ("[ ]", "")


def test_nccl_that_cannot_be_loaded_is_explained(report_with: Callable[..., str]):
    report = report_with("cuda.nccl.version = lambda: fail('NCCL Error 3')\n")
    assert _devices(report)[-1] == "NCCL cannot be loaded: NCCL Error 3"
    assert _entries(report)["NCCL"] == ("[ ]", "")
    report = report_with("distributed.is_nccl_available = lambda: False\n")
    without = "NCCL cannot be loaded: PyTorch 2.99.0+cu130 is built without it"
    assert _devices(report)[-1] == without


def test_a_driver_that_ends_the_process_is_survived(report_with: Callable[..., str]):
    report = report_with("cuda.init = os.abort\n")
    assert _devices(report) == ["not known: the check was ended by SIGABRT"]


def test_a_driver_that_never_answers_is_given_up(
    report_with: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build, "_KILL_SECONDS", 0.1)
    monkeypatch.setenv("CHILD_FILE", str(tmp_path / "child"))
    report = report_with(HANGING_DRIVER, limit=3.0)
    if (tmp_path / "child").exists():  # a slow machine may not have come that far
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert _devices(report) == ["not known: no answer within 3 s"]


def test_without_pytorch_devices_are_not_known(report_with: Callable[..., str]):
    report = report_with("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    assert _devices(report) == ["not known: PyTorch is not installed"]


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
    assert _devices(report) == ["not known: OSError: libtorch_cpu.so: cannot open"]
