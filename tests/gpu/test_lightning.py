"""A Trainer with ``strategy="horovod"`` on ranks that talk through NCCL."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovod.torch as hvd
from tests.accelerators import own_device
from tests.gpu import JOBS, size_of
from tests.gpu.pools import GpuPools
from tests.gpu.training import assert_alike, precise, weights_of

SAMPLES, FEATURES, BATCH, EPOCHS = 48, 8, 4, 2
PACKAGES = ("lightning.pytorch", "pytorch_lightning")

HAVE = [name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0])]
pytestmark = pytest.mark.skipif(not HAVE, reason="needs lightning or pytorch-lightning")


def dataset() -> TensorDataset:
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def module(package: str) -> Any:
    """Ranks begin with weights of their own: the first rank's count."""

    class Net(importlib.import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network(seed=1 + hvd.rank())
            self.devices: set[torch.device] = set()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            self.devices.add(inputs.device)
            loss = F.mse_loss(self.net(inputs), targets)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    return Net()


def fitted(package: str, precision: str) -> tuple[Any, Any, set[torch.device], float]:
    device = precise()
    trainer = importlib.import_module(package).Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        strategy="horovod",
        precision=precision,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    net = module(package)
    sampler = DistributedSampler(dataset(), hvd.size(), hvd.rank(), shuffle=False)
    trainer.fit(net, DataLoader(dataset(), batch_size=BATCH, sampler=sampler))
    return weights_of(net), alone(device), net.devices, float(trainer.callback_metrics["loss"])


def alone(device: torch.device) -> list[torch.Tensor]:
    """What one process makes of the batches of all ranks."""
    net = network(seed=1).to(device)
    optimizer = make_optimizer(net.parameters())
    inputs, targets = (tensor.to(device) for tensor in dataset().tensors)
    size = hvd.size()
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, size * BATCH):
            rows = slice(start, start + size * BATCH)  # sample i is rank i % size's
            optimizer.zero_grad()
            F.mse_loss(net(inputs[rows]), targets[rows]).backward()
            optimizer.step()
    return weights_of(net)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("package", HAVE)
@pytest.mark.parametrize("job", [job for job in JOBS if job.endswith("ranks")])
def test_like_one_process(gpus: GpuPools, job: str, package: str, precision: str):
    results = gpus.run(job, fitted, package, precision)
    devices = gpus.run(job, own_device)
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if "16" in precision else {"rtol": 1e-3, "atol": 1e-4}
    assert_alike([(mine, expected) for mine, expected, _, _ in results], **tolerance)
    for device, (_, _, used, _) in zip(devices, results, strict=True):
        assert used == {device}
    assert len({loss for _, _, _, loss in results}) == 1, "a metric that is everybody's"
    assert size_of(job) == len(results)
