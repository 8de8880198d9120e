"""The accelerator named "horovod", for kinds of devices that Lightning has no accelerator for.

Lightning 1.x took ``Trainer(accelerator="horovod")``. Here that chooses the strategy. On CUDA and
on the CPU the strategy works with Lightning's own accelerators; on other devices that torch knows,
such as XPU, it works with this one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from horovod.lightning.flavours import Flavour, join_with_base


class Accelerator:
    """The device that `torch.accelerator` finds on this machine, or the CPU.

    ``Trainer(accelerator="horovod")`` uses it by itself on devices that Lightning does not know.
    """

    is_horovod = True
    flavour: Flavour

    def setup_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            _set_device_index(device.index or 0)

    def setup(self, trainer: Any) -> None:
        """Do nothing: `setup_device` prepares all that is needed."""

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
        """Return device indices from a number, a list, or a string such as "0,1"."""
        if isinstance(devices, str):
            devices = [int(part) for part in devices.split(",") if part.strip()]
            if len(devices) == 1:
                devices = devices[0]
        if isinstance(devices, int):
            available = Accelerator.auto_device_count() if _kind() != "cpu" else devices
            return list(range(available if devices == -1 else devices))
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


# -- torch.accelerator; torch before 2.6 lacks it, and CUDA alone is looked for ------------------


def current_accelerator() -> torch.device | None:
    """Return the type of device that is available, or None."""
    if hasattr(torch, "accelerator"):
        accelerator = torch.accelerator
        return accelerator.current_accelerator() if accelerator.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def device_count() -> int:
    """Return the number of devices that this process sees."""
    if hasattr(torch, "accelerator"):
        return torch.accelerator.device_count()
    return torch.cuda.device_count()


def _set_device_index(index: int) -> None:
    """Make this the current device."""
    if hasattr(torch, "accelerator"):
        torch.accelerator.set_device_index(index)
    else:
        torch.cuda.set_device(index)


def _kind() -> str:
    """Return the type of this machine's devices, such as "xpu" or "cpu"."""
    device = current_accelerator()
    return "cpu" if device is None else device.type


@functools.cache
def accelerator_class(flavour: Flavour) -> Any:
    """Make the accelerator for this package's Trainer."""
    base = flavour.trainer_part("accelerators.accelerator").Accelerator
    return join_with_base("HorovodAccelerator", Accelerator, base, flavour)


@functools.cache
def fabric_accelerator_class(flavour: Flavour) -> Any:
    """Make the accelerator for this package's Fabric, which does not import the Trainer."""
    base = flavour.fabric_part("accelerators.accelerator").Accelerator
    return join_with_base("HorovodAccelerator", Accelerator, base, flavour)
