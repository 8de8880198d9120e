"""Horovod beside torch.distributed in one program: the bits of DDP, and no deadlock with it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd
from tests.accelerators import on_cpu, own_device
from tests.gpu import JOBS, size_of
from tests.gpu.pools import GpuPools
from tests.gpu.training import TIGHT, default_group, precise, weights_of

Tensor = torch.Tensor

STEPS = 20


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 10)
        )
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def trained(model: nn.Module, optimizer: Any, autocast: bool) -> tuple[list[float], list[Tensor]]:
    device = own_device()
    generator = torch.Generator().manual_seed(hvd.rank())
    losses = []
    for _ in range(STEPS):
        images = torch.randn(16, 1, 8, 8, generator=generator)
        labels = images[:, 0, 0, :].argmax(1).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(images.to(device)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights_of(model)


RUNS = [(kind, autocast) for kind in ("mlp", "cnn") for autocast in (False, True)]


def ours_and_ddps() -> list[Any]:
    device, options = precise(), {"lr": 0.05, "momentum": 0.9}
    pairs = []
    with default_group():
        for kind, autocast in RUNS:
            model = network(kind).to(device)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), **options), model.named_parameters()
            )
            mine = trained(model, optimizer, autocast)
            ddp = DistributedDataParallel(network(kind).to(device), gradient_as_bucket_view=True)
            theirs = trained(ddp, torch.optim.SGD(ddp.parameters(), **options), autocast)
            del ddp
            pairs.append((mine, theirs))
    return pairs


@pytest.mark.parametrize("job", JOBS)
def test_losses_and_parameters_are_those_of_ddp(gpus: GpuPools, job: str):
    for pairs in gpus.run(job, ours_and_ddps):
        for (kind, autocast), (mine, theirs) in zip(RUNS, pairs, strict=True):
            (losses, weights), (their_losses, their_weights) = mine, theirs
            assert sum(losses[-3:]) < sum(losses[:3]), kind
            if size_of(job) == 2:  # there is one order only in which two numbers can be added
                assert losses == their_losses, (kind, autocast)
                assert all(map(torch.equal, weights, their_weights)), (kind, autocast)
            elif not autocast:
                torch.testing.assert_close(weights, their_weights, rtol=1e-2, atol=1e-3)


def peak_memory(of_ddp: bool) -> int:
    """Bytes of tensors at the worst moment of some steps, as torch counts them."""
    device = own_device()
    gc.collect()  # what earlier programs of these ranks have left
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model: nn.Module = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).to(device)
    if of_ddp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if not of_ddp:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(16, 1024, device=device)).sum().backward()
        optimizer.step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peaks() -> tuple[int, int]:
    mine = peak_memory(of_ddp=False)
    with default_group():
        theirs = peak_memory(of_ddp=True)
        gc.collect()  # DDP's reducer, before its group ends
    return mine, theirs


@pytest.mark.skipif(on_cpu(), reason="needs tensors on a GPU")
@pytest.mark.parametrize("job", ["2 ranks", "2 hosts"])
def test_memory_is_no_more_than_ddps(gpus: GpuPools, job: str):
    """But for small change: workspaces, and what the allocator rounds up."""
    for mine, theirs in gpus.run(job, peaks):
        assert mine <= 1.05 * theirs


def trained_side_by_side(steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Two models in one loop, one of them DDP's; both reduce while backward of both goes on."""
    device = precise()
    torch.manual_seed(0)
    models = [nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with default_group():
        ddp = DistributedDataParallel(models[1])
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(models[0].parameters(), lr=0.1), models[0].named_parameters()
            ),
            torch.optim.SGD(ddp.parameters(), lr=0.1),
        ]
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(steps):
            x = torch.randn(8, 512, generator=generator).to(device)
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [net(x).square().mean() for net in (models[0], ddp)]
            for loss in losses:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        found = weights_of(models[0]), weights_of(models[1])
        del ddp
    return found


@pytest.mark.parametrize("job", JOBS)
def test_ddp_in_the_same_loop(gpus: GpuPools, job: str):
    results = gpus.run(job, trained_side_by_side, 15)
    for mine, theirs in results:
        assert all(map(torch.equal, mine, results[0][0])), "ranks differ"
        for ours, ddps in zip(mine, theirs, strict=True):
            if size_of(job) == 2:
                assert torch.equal(ours, ddps)
            torch.testing.assert_close(ours, ddps, **TIGHT)


def reduced_side_by_side(rounds: int) -> list[float]:
    """The program's own groups and ours under way at the same time, begun in turns."""
    device, found = own_device(), []
    with default_group():
        chosen = torch.distributed.new_group(list(range(hvd.size())))
        for number in range(rounds):
            elements = 10 if number < rounds // 2 else 1_000_000
            mine, theirs, others = (torch.ones(elements, device=device) for _ in range(3))
            works = []
            if number % 2:
                works.append(torch.distributed.all_reduce(theirs, async_op=True))
            handle = hvd.allreduce_async_(mine, op=hvd.Sum, name=f"mine.{number}")
            if not number % 2:
                works.append(torch.distributed.all_reduce(theirs, async_op=True))
            works.append(torch.distributed.all_reduce(others, group=chosen, async_op=True))
            hvd.synchronize(handle)
            for work in works:
                work.wait()
            found += [float(each.min()) for each in (mine, theirs, others)]
    return found


@pytest.mark.parametrize("job", JOBS)
def test_groups_of_the_programs_own(gpus: GpuPools, job: str):
    for found in gpus.run(job, reduced_side_by_side, 20):
        assert found == [float(size_of(job))] * 60
