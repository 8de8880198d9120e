"""The accelerator named "horovod": this rank's device, of a kind that Lightning has none for.

Lightning 1.x took ``Trainer(accelerator="horovod")``. Here that means the strategy, on CUDA or the
CPU with Lightning's own accelerators, and on others that torch knows (XPU) with this one.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.lightning.current_device import (
    current_accelerator,
    device_count,
    set_device_index,
)
from horovod.lightning.flavours import Flavour


class Accelerator:
    """Whatever `torch.accelerator` finds here, or the CPU."""

    is_horovod = True
    flavour: Flavour

    def setup_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            set_device_index(device.index or 0)

    def setup(self, trainer: Any) -> None:
        """Nothing to prepare beyond the device."""

    def teardown(self) -> None:
        if _kind() != "cpu":
            torch.get_device_module(_kind()).empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        kind = torch.device(device).type
        if kind == "cpu":
            return dict(self.flavour.trainer_part("accelerators.cpu").get_cpu_stats())
        stats = getattr(torch.get_device_module(kind), "memory_stats", None)
        return {} if stats is None else dict(stats(device))

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """Indices of devices from a number, a list, or a text such as "0,1"."""
        if isinstance(devices, str):
            devices = [int(part) for part in devices.split(",") if part.strip()]
            if len(devices) == 1:
                devices = devices[0]
        if isinstance(devices, int):
            most = Accelerator.auto_device_count() if _kind() != "cpu" else devices
            return list(range(most if devices == -1 else devices))
        return [int(index) for index in devices]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        kind = _kind()
        return [torch.device("cpu") if kind == "cpu" else torch.device(kind, i) for i in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1 if _kind() == "cpu" else device_count()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "horovod"


def _kind() -> str:
    device = current_accelerator()
    return "cpu" if device is None else device.type
