"""Upstream's home of the helpers that send parameters, optimizer state and objects."""

from __future__ import annotations

from horovod.torch.objects import allgather_object, broadcast_object
from horovod.torch.parameters import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
