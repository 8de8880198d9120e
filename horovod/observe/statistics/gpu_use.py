"""Ask NVIDIA's library (NVML) how busy this rank's GPU is, and how much memory it has.

The reporter asks, from its own thread, before each report. The Python package for NVML is
optional (`pip install nvidia-ml-py`). Without it, or without an NVIDIA GPU, nothing is reported
here, and what is left is the memory that torch itself counts.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any


class GpuUse:
    """The numbers of one GPU. Used by one thread."""

    def __init__(self, module: str = "pynvml") -> None:
        self._module = module
        self._library: Any = None
        self._device: Any = None
        self._uuid = ""
        self._is_missing = False

    def look(self, uuid: str) -> dict[str, float]:
        """Return the numbers of the GPU with this UUID, or nothing where they are unknown.

        `gpu_use` is the share of the last moment in which the GPU computed, from 0 to 1. Both
        numbers are about the whole GPU, which several ranks may share.
        """
        if not uuid or self._is_missing:
            return {}
        try:
            if self._uuid != uuid:
                self._open(uuid)
            busy = self._library.nvmlDeviceGetUtilizationRates(self._device).gpu
            memory = self._library.nvmlDeviceGetMemoryInfo(self._device).total
            return {"gpu_use": busy / 100, "gpu_memory_total_bytes": int(memory)}
        except Exception:
            # No package, no driver, a GPU that NVML cannot ask: a report is never worth an error.
            self._is_missing = True
            return {}

    def _open(self, uuid: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an older package of the same name is deprecated
            self._library = importlib.import_module(self._module)
        self._library.nvmlInit()
        self._device = self._library.nvmlDeviceGetHandleByUUID(uuid)
        self._uuid = uuid
