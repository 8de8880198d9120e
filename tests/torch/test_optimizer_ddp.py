"""DistributedOptimizer against torch's DistributedDataParallel: the same losses, bit by bit."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd
from tests.ranks import PATIENCE, run_ranks

STEPS = 50


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 96),
            nn.ReLU(),
            nn.Linear(96, 96),
            nn.ReLU(),
            nn.Linear(96, 10),
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


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        images = torch.randn(16, 1, 8, 8, generator=generator)
        labels = images[:, 0, 0, :].argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _meet(rank: int, size: int) -> torch.distributed.Store:
    """A store of torch's own for its process group."""
    here, limit = "127.0.0.1", timedelta(seconds=PATIENCE)
    if rank == 0:
        store = torch.distributed.TCPStore(here, 0, size, True, limit, wait_for_workers=False)
        hvd.broadcast_object(store.port)
        return store
    port = hvd.broadcast_object(None)
    return torch.distributed.TCPStore(here, port, size, False, limit, wait_for_workers=False)


def _ours(rank: int, kind: str) -> list[float]:
    model = _model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return _losses(model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), rank)


def _theirs(rank: int, kind: str) -> list[float]:
    model = DistributedDataParallel(_model(kind), gradient_as_bucket_view=True, static_graph=True)
    return _losses(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), rank)


def _both(rank: int, size: int, kind: str) -> list[list[float]]:
    hvd.init()
    mine = _ours(rank, kind)
    store = _meet(rank, size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    theirs = _theirs(rank, kind)
    torch.distributed.destroy_process_group()
    hvd.barrier()  # rank 0 serves the store
    return [mine, theirs]


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_losses_are_those_of_ddp(kind: str):
    for mine, reference in run_ranks(_both, 2, kind):
        assert mine == reference
        assert len(set(mine)) == STEPS
        assert sum(mine[-5:]) < sum(mine[:5])
