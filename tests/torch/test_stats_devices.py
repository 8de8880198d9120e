"""`hvd.stats()` where an accelerator computes and reduces. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from tests.accelerators import accelerator as find_accelerator
from tests.ranks import RankPool

accelerator = find_accelerator()
pytestmark = pytest.mark.skipif(accelerator is None, reason="needs an accelerator")

STEPS = 6


@pytest.fixture(scope="module", params=[1, 2])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    # An elastic job reduces also where it happens to have one rank.
    pool = RankPool(request.param, env={"HOROVOD_ELASTIC": "1"})
    yield pool
    pool.close()


def train(device: torch.device) -> dict[str, Any]:
    layers = [torch.nn.Linear(2048, 2048) for _ in range(6)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-6), named_parameters=model.named_parameters()
    )
    data = torch.ones(512, 2048, device=device)

    def step() -> None:
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.accelerator.synchronize()
    before = hvd.stats()
    for _ in range(STEPS):
        step()
    torch.accelerator.synchronize()
    step()  # which counts what the device did in those before
    torch.accelerator.synchronize()
    after = hvd.stats()
    numbers = [key for key, value in after.items() if isinstance(value, (int, float))]
    found = {key: after[key] - before[key] for key in numbers}
    nbytes = sum(param.nbytes for param in model.parameters())
    return found | {"now": after["gpu_memory_bytes"], "model": nbytes, "size": hvd.size()}


def test_training(pool: RankPool):
    for numbers in pool.run(train, accelerator):
        assert numbers["steps"] == STEPS + 1
        moved = numbers["model"] * (STEPS + 1)
        assert numbers["bytes_reduced"] == moved
        alone = numbers["size"] == 1
        # Two ranks share the device, which its library refuses: they take host memory's way.
        assert numbers["bytes_device"] == (moved if alone else 0)
        assert numbers["bytes_shared_memory"] == (0 if alone else moved)
        assert numbers["now"] > numbers["model"]
        assert 0 < numbers["backward_seconds"] < numbers["step_seconds"]
        assert numbers["reduce_seconds"] > 0
        assert 0 <= numbers["hidden_seconds"] <= numbers["wait_seconds"] + numbers["reduce_seconds"]
        print(numbers)
