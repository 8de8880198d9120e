"""DistributedOptimizer's way on devices, tried with CPU tensors: Gloo takes NCCL's place.

`lanes()` is for functions that run in ranks, whose environment is `own_device`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd
from horovod.torch.gradients import plan
from horovod.torch.gradients.direct_reducer import DirectReducer
from tests.transport.device_stand_in import CPU, in_nccls_place


def own_device(rank: int) -> dict[str, str]:
    """The environment of a rank that has a device of its own, as NCCL sees it."""
    return {"NCCL_HOSTID": f"host of rank {rank}"}


@contextlib.contextmanager
def lanes() -> Iterator[None]:
    """Let optimizers made and used meanwhile reduce the way they do on devices."""
    with in_nccls_place(), mock.patch.object(plan, "lane_device", return_value=CPU):
        yield


def direct(optimizer: Any) -> DirectReducer:
    """What reduces the optimizer's gradients; it must be the way of devices."""
    found = optimizer._reducer._direct
    assert isinstance(found, DirectReducer)
    return found


def parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


class Model(nn.Module):
    """Parameters of several sizes, layouts and types, one of them not used in every step."""

    def __init__(self, width: int, channels_last: bool = False, half: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(nn.Linear(8 * 16, width), nn.Tanh(), nn.Linear(width, width))
        self.extra = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)
        if channels_last:
            self.conv = self.conv.to(memory_format=torch.channels_last)
        if half:
            self.extra = self.extra.to(torch.bfloat16)

    def forward(self, inputs: torch.Tensor, uses_extra: bool = True) -> torch.Tensor:
        x = self.body(torch.tanh(self.conv(inputs)).flatten(1))
        if uses_extra:
            x = x + self.extra(x.to(self.extra.weight.dtype)).to(x.dtype)
        return self.head(torch.tanh(x))


@dataclass(frozen=True)
class Training:
    """A training that is the same on one process and on many, within rounding."""

    width: int = 40
    channels_last: bool = False
    half: bool = False
    compression: str = "none"
    predivide: float = 1.0
    passes: int = 1
    keeps_gradients: bool = False
    skips_extra: bool = False  # in every other step, on the first rank only
    groups: int | None = None
    steps: int = 4

    def model(self) -> Model:
        torch.manual_seed(1)
        return Model(self.width, self.channels_last, self.half)

    def batch(self, step: int, part: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
        return (
            torch.randn(4, 3, 4, 4, generator=generator),
            torch.randint(4, (4,), generator=generator),
        )

    def uses_extra(self, step: int, rank: int) -> bool:
        return not (self.skips_extra and step % 2 and rank == 0)

    def loss(self, model: Model, step: int, part: int, rank: int) -> torch.Tensor:
        inputs, targets = self.batch(step, part, rank)
        return F.cross_entropy(model(inputs, self.uses_extra(step, rank)), targets)


def distributed(model: nn.Module, lr: float = 0.1) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters()
    )
