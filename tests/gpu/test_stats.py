"""`hvd.stats()` where NCCL reduces: the device's time is in the numbers, asked for or not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from tests.accelerators import own_device
from tests.gpu import JOBS
from tests.gpu.pools import GpuPools
from tests.ranks import check_times

STEPS = 6
LAYERS, WIDTH = 6, 1024


def complete(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def seconds_of_reduction(num_bytes: int, device: torch.device) -> float:
    """What all gradients take at once and with nothing beside them: the least of a few times."""
    everything = torch.zeros(num_bytes // 4, device=device)
    best = float("inf")
    for _ in range(4):
        hvd.barrier()
        began = time.perf_counter()
        hvd.allreduce_(everything, name="at once", op=hvd.Sum)
        complete(device)
        best = min(best, time.perf_counter() - began)
    return best


def trained(rows: int) -> dict[str, Any]:
    """What `hvd.stats()` counts in some steps."""
    device = own_device()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-6), model.named_parameters()
    )
    data = torch.ones(rows, WIDTH, device=device)
    num_bytes = sum(param.nbytes for param in model.parameters())

    def step() -> None:
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    alone = seconds_of_reduction(num_bytes, device)
    for _ in range(3):
        step()
    complete(device)
    step()  # which counts what the device did in those before
    complete(device)
    before = hvd.stats()
    for _ in range(STEPS):
        step()
        complete(device)
    after = hvd.stats()
    numbers = [key for key, value in after.items() if isinstance(value, (int, float))]
    found = {key: after[key] - before[key] for key in numbers}
    return found | {"model": num_bytes, "alone": alone, "device": device.type}


def check(results: list[dict[str, Any]]) -> None:
    for numbers in results:
        assert numbers["steps"] == STEPS
        assert numbers["bytes_reduced"] == numbers["model"] * STEPS
        if numbers["device"] == "cpu":
            continue
        assert numbers["bytes_device"] == numbers["model"] * STEPS
        assert numbers["buckets"] > STEPS, "so that backward can hide the first ones"
        # A step's events may be counted in the next one: of the order of the device's time.
        each = numbers["reduce_seconds"] / STEPS
        assert numbers["alone"] / 5 < each < 20 * numbers["alone"], numbers
        assert 0 < numbers["backward_seconds"] < numbers["step_seconds"], numbers
        assert numbers["reduce_seconds"] < 1.5 * numbers["step_seconds"], numbers
        assert numbers["hidden_seconds"] > 0, numbers
        most = numbers["wait_seconds"] + numbers["reduce_seconds"]
        assert numbers["hidden_seconds"] <= 1.01 * most, numbers


@pytest.mark.parametrize("job", JOBS)
def test_training(gpus: GpuPools, job: str):
    rows = 64 if gpus.run(job, own_device)[0].type == "cpu" else 16384
    check_times(lambda: gpus.run(job, trained, rows), check)


def blocking(elements: int) -> tuple[float, float]:
    """Seconds that collectives took by the clock on the wall, and by the numbers."""
    device = own_device()
    tensor = torch.zeros(elements, device=device)
    hvd.allreduce_(tensor, name="blocking")
    complete(device)
    before, began = hvd.stats(), time.perf_counter()
    for _ in range(5):
        hvd.allreduce_(tensor, name="blocking")
        complete(device)
    seconds = time.perf_counter() - began
    after = hvd.stats()
    keys = ("wait_seconds", "reduce_seconds")
    return seconds, sum(after[key] - before[key] for key in keys)


def check_blocking(results: list[tuple[float, float]]) -> None:
    for seconds, counted in results:
        assert seconds / 5 < counted < 2 * seconds


@pytest.mark.parametrize("job", JOBS)
def test_collectives_that_the_program_waits_for(gpus: GpuPools, job: str):
    check_times(lambda: gpus.run(job, blocking, 5_000_000), check_blocking)
