"""Modules, data and Trainers for the tests, and how results are compared with one process's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES, FEATURES, BATCH = 64, 8, 4

warnings.filterwarnings("ignore", message=".*LeafSpec.*")


def dataset(samples: int = SAMPLES, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def loader(batch: int = BATCH, samples: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(samples), batch_size=batch, **options)


class BothRanks(Sampler[int]):
    """The samples of two ranks in an order in which one process meets their batches together."""

    def __init__(self, data: TensorDataset, batch: int) -> None:
        self._parts = [DistributedSampler(data, 2, rank) for rank in range(2)]
        self._batch = batch

    def set_epoch(self, epoch: int) -> None:
        for part in self._parts:
            part.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        orders = [list(part) for part in self._parts]
        for first in range(0, len(orders[0]), self._batch):
            for order in orders:
                yield from order[first : first + self._batch]

    def __len__(self) -> int:
        return sum(map(len, self._parts))


class Net(pl.LightningModule):
    """A small network; what the tests vary are its optimizer and what it logs."""

    def __init__(self, optimizer: Any = None, batch_norm: bool = False, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        middle = torch.nn.BatchNorm1d(16) if batch_norm else torch.nn.Tanh()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 16), middle, torch.nn.Linear(16, 1)
        )
        self.make_optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return F.mse_loss(self(inputs), targets)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}


def trainer(strategy: Any = "horovod", **options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", strategy=strategy, **{**QUIET, "max_epochs": 2, **options})


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


def fitted(module: pl.LightningModule, strategy: Any = "horovod", **options: Any) -> Any:
    """Fit on this rank's part of the data; what the module learned, and the Trainer."""
    made = trainer(strategy, **options)
    made.fit(module, loader())
    return weights(module), made


def alone(module: pl.LightningModule, **options: Any) -> list[torch.Tensor]:
    """The same by one process that takes the batches of two ranks together."""
    made = trainer("auto", devices=1, **options)
    data = dataset()
    made.fit(module, DataLoader(data, 2 * BATCH, sampler=BothRanks(data, BATCH)))
    return weights(module)


def assert_same(results: list[Any], expected: list[torch.Tensor] | None = None) -> None:
    """All ranks have the same bits, and within rounding those that one process has."""
    for mine in results:
        for one, other in zip(mine, results[0], strict=True):
            assert torch.equal(one, other), "ranks differ"
    if expected is not None:
        for one, other in zip(results[0], expected, strict=True):
            torch.testing.assert_close(one, other)
