"""What the program of --check finds out on a host."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from horovod.runner.agents import host_inspection as inspection


class Nvml:
    """The driver's library on a host with two GPUs."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def nvmlSystemGetDriverVersion(self, text: Any, _: int) -> int:
        text.value = b"570.86.15"
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = 1000 + index
        return 0

    def nvmlDeviceGetName(self, device: Any, text: Any, _: int) -> int:
        text.value = b"H100 %d" % device.value
        return 0


class Nccl:
    def ncclGetVersion(self, number: Any) -> int:
        number._obj.value = 22705
        return 0


def test_devices(monkeypatch: pytest.MonkeyPatch):
    libraries = {"libnvidia-ml.so.1": Nvml(), "libnccl.so.2": Nccl()}
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    monkeypatch.setattr(inspection, "_NCCL_PACKAGES", ())
    assert inspection.find_gpus() == (["H100 1000", "H100 1001"], "570.86.15")
    assert inspection.nccl_version() == "2.27.5"


def test_no_devices(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(inspection, "_NCCL_PACKAGES", ("no-such-package",))
    assert inspection.find_gpus() == ([], "")
    assert inspection.nccl_version() == ""


def test_versions_without_importing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('nobody imports it')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cu128'\ncuda = '12.8'\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert inspection.torch_version() == "2.9.1+cu128"
    (tmp_path / "torch" / "__init__.py").unlink()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "torch")])
    assert inspection.torch_version() == ""


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    before = inspection.folder_digest(".")
    Path("train.py").write_text("1")
    os.utime("train.py", (1, 1))
    after = inspection.folder_digest(".")
    Path("train.py").write_text("22")
    os.utime("train.py", (1, 1))
    assert len({before, after, inspection.folder_digest(".")}) == 3
    assert inspection.is_working_folder(str(tmp_path))
    assert not inspection.is_working_folder("/")
    assert not inspection.is_working_folder(str(tmp_path / "gone"))
    assert [name for name in ("sh", "train.py", "no.py") if not inspection.is_here(name)] == [
        "no.py"
    ]


def test_neighbours_are_measured_and_strangers_get_no_answer():
    token = secrets.token_bytes(32)
    port = inspection.serve("127.0.0.1", token)
    question = {
        "neighbours": [["a", "127.0.0.1", port, True], ["b", "127.0.0.1", port, False]],
        "seconds": 100.0,
    }
    found = inspection.measure_neighbours(question, token)
    assert found["a"]["rate"] > 0 < found["a"]["seconds"]
    assert set(found["b"]) == {"seconds"}
    assert "error" in inspection.measure_neighbours(question, secrets.token_bytes(32))["a"]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    refused = inspection.measure("127.0.0.1", nobody, token, 100.0, False)
    assert "refused" in refused["error"]
