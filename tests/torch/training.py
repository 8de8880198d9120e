"""Models, optimizers and data for tests of DistributedOptimizer, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import horovod.torch as hvd

ROWS = 4  # of each rank's batch


class Tied(nn.Module):
    """Input and output share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6, bias=False)
        self.decode = nn.Linear(6, 6, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.tanh(self.encode(x)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return self.last(checkpoint(self.first, x, use_reentrant=self.reentrant))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _conv() -> nn.Module:
    model = nn.Sequential(
        nn.Unflatten(1, (3, 1, 2)), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten()
    )
    return model.to(memory_format=torch.channels_last)


class Mixed(nn.Module):
    """Parameters of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).double()) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "conv": _conv,
    "tied": Tied,
    "mixed": Mixed,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed reentrant": lambda: Checkpointed(True),
}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
}


def batch_of(step: int, size: int) -> torch.Tensor:
    """All ranks' inputs of one step."""
    return torch.randn(size * ROWS, 6, generator=torch.Generator().manual_seed(step))


def my_rows(batch: torch.Tensor) -> torch.Tensor:
    return batch[hvd.rank() * ROWS : (hvd.rank() + 1) * ROWS]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()


def make_model(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind]()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@contextmanager
def overlapping(overlap: bool) -> Iterator[None]:
    """Reduce while backward goes on (or not), wherever the parameters are."""
    with mock.patch("horovod.torch.gradients.plan.can_overlap", return_value=overlap):
        yield


def train(model: nn.Module, optimizer: Any, steps: int, pick: Callable[..., Any]) -> None:
    for step in range(steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, pick(batch_of(step, hvd.size())))
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def assert_equal(results: list[Any], **tolerance: float) -> None:
    for together, alone in results:
        for mine, theirs, expected in zip(together, results[0][0], alone, strict=True):
            assert torch.equal(mine, theirs), "ranks differ"
            torch.testing.assert_close(mine, expected, **tolerance)
