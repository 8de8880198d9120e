"""SyncBatchNorm on devices against one BatchNorm on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import horovod.torch as hvd
from horovod.torch.sync_batch_norm import SyncBatchNorm
from tests.accelerators import own_device
from tests.gpu import JOBS, size_of
from tests.gpu.pools import GpuPools, few_examples
from tests.gpu.training import TIGHT, assert_alike, precise, sgd, weights_of
from tests.torch.test_sync_batch_norm import Layer, _check, layers
from tests.torch.training import batch_of, loss_of, my_rows


def normalised(layer: Layer) -> dict[str, Any]:
    return layer.run(layer.module(SyncBatchNorm), hvd.rank(), str(own_device()))


@pytest.mark.parametrize("job", JOBS)
@few_examples
@given(data=st.data())
def test_like_one_layer_on_the_whole_batch(gpus: GpuPools, job: str, data: st.DataObject):
    layer = data.draw(layers(size_of(job)))
    _check(layer, gpus.run(job, normalised, layer))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (3, 1, 2)),
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    )


def trained() -> Any:
    """A model of torch's layers, converted, in the hands of a DistributedOptimizer."""
    device = precise()
    alone = network().to(device)
    together = SyncBatchNorm.convert_sync_batchnorm(network()).to(device)
    optimizer = hvd.DistributedOptimizer(sgd(together.parameters()), together.named_parameters())
    base = sgd(alone.parameters())
    for step in range(4):
        batch = batch_of(step, hvd.size()).to(device)
        for model, own, rows in ((together, optimizer, my_rows(batch)), (alone, base, batch)):
            own.zero_grad()
            loss_of(model, rows).backward()
            own.step()
    buffers = [[each.cpu() for each in model.buffers()] for model in (together, alone)]
    return weights_of(together) + buffers[0], weights_of(alone) + buffers[1]


@pytest.mark.parametrize("job", JOBS)
def test_a_model_in_training(gpus: GpuPools, job: str):
    assert_alike(gpus.run(job, trained), rtol=1e-2, atol=100 * TIGHT["atol"])
