"""Whole training steps under torch.compile: forward, backward and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd
from tests.ranks import RankPool

SIZE = 2
STEPS = 5

OPTIONS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "plain": lambda _: {},
    "accumulating": lambda _: {"backward_passes_per_step": 2},
    "sharded": lambda _: {"shard_state": True},
    "Adasum": lambda _: {"op": hvd.Adasum},
    "delayed": lambda model: {"overlap_forward": model},
}


def train(how: str, compiled: str | None) -> tuple[list[float], tuple[int, int]]:
    """The losses, and how many graphs the compiler made, with how many breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = OPTIONS[how](model) if how in OPTIONS else None
    if options is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    passes = 2 if how == "accumulating" else 1

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        for _ in range(passes):
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        return loss.detach()

    run = step
    if compiled == "optimizer":
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    elif compiled is not None:
        run = torch.compile(step, backend="aot_eager")
    losses = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(10 * number + hvd.rank())
        inputs = torch.randn(4, 8, generator=generator)
        losses.append(float(run(inputs, inputs[:, :4])))
    counters = torch._dynamo.utils.counters
    return losses, (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


@pytest.mark.parametrize("how", OPTIONS)
def test_a_compiled_step_trains_as_it_is(pool2: RankPool, how: str):
    eager = pool2.run(train, how, None)
    for (expected, _), (found, _) in zip(eager, pool2.run(train, how, "step"), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("compiled", ["step", "optimizer"])
def test_as_many_graphs_and_breaks_as_without_us(pool2: RankPool, compiled: str):
    alone = [counts for _, counts in pool2.run(train, "torch alone", compiled)]
    ours = [counts for _, counts in pool2.run(train, "plain", compiled)]
    assert alone == ours
    assert alone[0][0] > 0
