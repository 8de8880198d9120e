"""DistributedOptimizer's way on devices, tried with CPU tensors: Gloo takes NCCL's place.

`lanes()` is for functions that run in ranks, whose environment is `own_device`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from horovod.torch import gradients
from horovod.torch.direct_reducer import DirectReducer
from tests.transport.device_stand_in import CPU, in_nccls_place


def own_device(rank: int) -> dict[str, str]:
    """The environment of a rank that has a device of its own, as NCCL sees it."""
    return {"NCCL_HOSTID": f"host of rank {rank}"}


@contextlib.contextmanager
def lanes() -> Iterator[None]:
    """Let optimizers made and used meanwhile reduce the way they do on devices."""
    with in_nccls_place(), mock.patch.object(gradients, "lane_device", return_value=CPU):
        yield


def direct(optimizer: Any) -> DirectReducer:
    """What reduces the optimizer's gradients; it must be the way of devices."""
    found = optimizer._reducer._direct
    assert isinstance(found, DirectReducer)
    return found


def parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]
