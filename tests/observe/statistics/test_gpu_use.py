"""What NVIDIA's library tells of a GPU, where it is there; nothing where it is not."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from horovod.observe.statistics.gpu_use import GpuUse


def library(asked: list[str]) -> ModuleType:
    module = ModuleType("a_pynvml")
    module.nvmlInit = lambda: asked.append("init")

    def handle(uuid: str) -> str:
        asked.append(uuid)
        if uuid == "GPU-lost":
            raise RuntimeError("GPU is lost")
        return uuid

    module.nvmlDeviceGetHandleByUUID = handle
    module.nvmlDeviceGetUtilizationRates = lambda device: SimpleNamespace(gpu=87, memory=3)
    module.nvmlDeviceGetMemoryInfo = lambda device: SimpleNamespace(total=2**34, used=5)
    return module


def test_numbers_of_the_rank_s_own_gpu(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "a_pynvml", library(asked))
    use = GpuUse("a_pynvml")
    assert use.look("") == {}
    assert asked == [], "a rank without a GPU asks nothing"
    for _ in range(2):
        assert use.look("GPU-1") == {"gpu_use": 0.87, "gpu_memory_total_bytes": 2**34}
    assert asked == ["init", "GPU-1"]


def test_without_the_library_or_the_gpu_there_is_nothing(monkeypatch: pytest.MonkeyPatch):
    assert GpuUse("no_such_module_at_all").look("GPU-1") == {}
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "a_pynvml", library(asked))
    use = GpuUse("a_pynvml")
    for _ in range(3):
        assert use.look("GPU-lost") == {}
    assert asked == ["init", "GPU-lost"], "and it is not asked again and again"
