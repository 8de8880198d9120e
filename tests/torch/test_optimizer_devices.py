"""DistributedOptimizer with parameters on an accelerator: two ranks that share it, and one alone.

One rank exercises the device's own collectives library in a world of one; two ranks on one device
go through host memory. tests/gpu has several ranks that use the library. Skipped where there is no
accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd
from tests.accelerators import accelerator as find_accelerator
from tests.ranks import RankPool

accelerator = find_accelerator()
pytestmark = pytest.mark.skipif(accelerator is None, reason="needs an accelerator")


@pytest.fixture(scope="module", params=[1, 2])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    # An elastic job reduces also where it happens to have one rank.
    pool = RankPool(request.param, env={"HOROVOD_ELASTIC": "1", "HOROVOD_FUSION_THRESHOLD": "4096"})
    yield pool
    pool.close()


class Model(nn.Module):
    """Small, with parameters of several sizes; `split` leaves the last layer on the CPU."""

    def __init__(self, device: torch.device, split: bool) -> None:
        super().__init__()
        self.device, self.split = device, split
        self.body = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
        self.head = nn.Linear(32, 4)
        self.body.to(device)
        self.head.to("cpu" if split else device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.body(inputs.to(self.device))
        return self.head(x.cpu() if self.split else x)


def _data(steps: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 8, 20, generator=generator),
            torch.randint(4, (size, 8), generator=generator),
        )
        for _ in range(steps)
    ]


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[torch.Tensor, ...]]
) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        outputs = model(inputs)
        F.cross_entropy(outputs, targets.to(outputs.device)).backward()
        optimizer.step()


def _distributed(split: bool, compressed: bool, steps: int) -> list[torch.Tensor]:
    assert accelerator is not None
    torch.manual_seed(1)
    model = Model(torch.device(accelerator.type, 0), split)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.bf16 if compressed else hvd.Compression.none,
    )
    rank = hvd.rank()
    _train(model, optimizer, [(x[rank], y[rank]) for x, y in _data(steps, hvd.size())])
    return [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_equals_one_process_with_the_whole_batch(pool: RankPool, split: bool, compressed: bool):
    steps = 10
    first, *others = pool.run(_distributed, split, compressed, steps)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    torch.manual_seed(1)
    model = Model(torch.device("cpu"), split=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _train(model, optimizer, [(x.flatten(0, 1), y.flatten()) for x, y in _data(steps, pool.size)])
    tolerance = 5e-2 if compressed else 1e-4
    for found, expected in zip(first, model.parameters(), strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=tolerance, atol=tolerance)


def _clipped_with_scaler() -> tuple[float, list[torch.Tensor]]:
    assert accelerator is not None
    torch.manual_seed(1)
    device = torch.device(accelerator.type, 0)
    model = Model(device, split=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters()
    )
    scaler = torch.amp.GradScaler(accelerator.type, init_scale=2.0**8, growth_interval=2)
    rank = hvd.rank()
    for step, (inputs, targets) in enumerate(_data(6, hvd.size())):
        optimizer.zero_grad()
        with torch.autocast(accelerator.type, torch.float16):
            loss = F.cross_entropy(model(inputs[rank].to(device)), targets[rank].to(device))
        if step == 3 and rank == 0:
            loss = loss * float("inf")  # one rank overflows: nobody may step
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), [param.detach().cpu() for param in model.parameters()]


def test_gradient_scaler_skips_on_all_ranks_alike(pool: RankPool):
    results = pool.run(_clipped_with_scaler)
    scale, params = results[0]
    assert all(torch.isfinite(param).all() for param in params)
    for other_scale, other_params in results[1:]:
        assert other_scale == scale
        assert all(torch.equal(a, b) for a, b in zip(params, other_params, strict=True))
