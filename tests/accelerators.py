"""The accelerator of this machine, if any, on every version of torch that we support."""

from __future__ import annotations

import torch


def accelerator() -> torch.device | None:
    """What `torch.accelerator` finds, which is there since torch 2.6."""
    if hasattr(torch, "accelerator"):
        found = torch.accelerator
        return found.current_accelerator() if found.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None
