"""The kind of accelerator that torch has here; `torch.accelerator` is there since torch 2.6."""

from __future__ import annotations

import torch


def current_accelerator() -> torch.device | None:
    """The kind of device that is available, or None."""
    if hasattr(torch, "accelerator"):
        found = torch.accelerator
        return found.current_accelerator() if found.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def device_count() -> int:
    if hasattr(torch, "accelerator"):
        return torch.accelerator.device_count()
    return torch.cuda.device_count()


def set_device_index(index: int) -> None:
    """Use this device from now on."""
    if hasattr(torch, "accelerator"):
        torch.accelerator.set_device_index(index)
    else:
        torch.cuda.set_device(index)
