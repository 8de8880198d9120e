"""Calls `torch.accelerator`; with torch before 2.6, which lacks it, this looks for CUDA alone."""

from __future__ import annotations

import torch


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


def set_device_index(index: int) -> None:
    """Make this the current device."""
    if hasattr(torch, "accelerator"):
        torch.accelerator.set_device_index(index)
    else:
        torch.cuda.set_device(index)
