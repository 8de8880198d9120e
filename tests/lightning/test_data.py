"""Who gets which data: an injected sampler, and ranks with different numbers of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

import horovod.torch as hvd
from horovod.lightning import HorovodStrategy
from tests.lightning.training import Net, assert_same, dataset, loader, trainer, weights
from tests.ranks import RankPool

FEWER, MORE = 3, 5  # batches of the two ranks


def uneven(batch: int = 4) -> DataLoader[Any]:
    """Of different length on each rank, and no two ranks have a sample in common."""
    first = 0 if hvd.rank() == 0 else FEWER * batch
    count = (FEWER, MORE)[hvd.rank()] * batch
    return DataLoader(Subset(dataset(), range(first, first + count)), batch_size=batch)


def test_every_sample_is_somebodys(ranks: RankPool):
    class Noting(Net):
        def training_step(self, batch: Any, index: int) -> Any:
            self.losses.append(batch[0].sum().item())
            return self.loss(batch)

    def train() -> list[float]:
        module = Noting()
        trainer(max_epochs=1).fit(module, loader(batch=1, samples=10))
        return module.losses

    seen = [round(value, 4) for part in ranks.run(train) for value in part]
    assert sorted(seen) == sorted(round(x.sum().item(), 4) for x, _ in dataset(10))


def test_uneven_data_without_join_is_named_before_training(ranks: RankPool):
    def train() -> str:
        module = Net()
        made = trainer(use_distributed_sampler=False)
        with pytest.raises(ValueError, match="different numbers of training batches") as caught:
            made.fit(module, uneven())
        assert module.losses == []
        return str(caught.value)

    for said in ranks.run(train):
        assert f"rank 0: {FEWER}, rank 1: {MORE}" in said
        assert f"limit_train_batches={FEWER}" in said
        assert "HorovodStrategy(join=True)" in said


class Stepping(Net):
    """With a scheduler that counts steps, and validation at the end of every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _plain(epochs: int) -> list[torch.Tensor]:
    """The same by hand: a missing rank counts as zeros, and the divisor stays 2."""
    module = Stepping()
    data, batch = dataset(), 4
    (optimizer,), (config,) = module.configure_optimizers()
    for _ in range(epochs):
        for step in range(MORE):
            optimizer.zero_grad()
            starts = [step * batch] * (step < FEWER) + [(FEWER + step) * batch]
            for start in starts:
                rows = [data[start + place] for place in range(batch)]
                part = [torch.stack(each) for each in zip(*rows, strict=True)]
                (module.loss(part) / 2).backward()
            optimizer.step()
            config["scheduler"].step()
    return weights(module)


@pytest.mark.parametrize("sized", [True, False])
def test_uneven_data_with_join(ranks: RankPool, sized: bool):
    class Stream(IterableDataset[Any]):
        def __init__(self, source: Any) -> None:
            self.source = source

        def __iter__(self) -> Any:
            return iter(self.source)

    def train() -> Any:
        module = Stepping()
        made = trainer(HorovodStrategy(join=True), use_distributed_sampler=False)
        data: Any = uneven() if sized else DataLoader(Stream(uneven().dataset), batch_size=4)
        made.fit(module, data, loader())
        rate = made.optimizers[0].param_groups[0]["lr"]
        return weights(module), len(module.losses), made.global_step, made.current_epoch, rate

    found = ranks.run(train)
    assert_same([each[0] for each in found], _plain(2))
    assert [each[1] for each in found] == [2 * FEWER, 2 * MORE]
    for _, _, steps, epochs, rate in found:
        assert (steps, epochs) == (2 * MORE, 2)
        assert rate == pytest.approx(0.1 * 0.9 ** (2 * MORE))


def test_join_when_the_number_of_steps_ends_an_epoch(ranks: RankPool):
    def train() -> Any:
        module = Stepping()
        made = trainer(
            HorovodStrategy(join=True), use_distributed_sampler=False, max_epochs=-1, max_steps=4
        )
        made.fit(module, uneven())
        return weights(module), made.global_step

    found = ranks.run(train)
    assert_same([each[0] for each in found])
    assert [each[1] for each in found] == [4, 4]


def test_join_goes_with_validation_at_the_end_of_epochs_only(ranks: RankPool):
    def train() -> None:
        made = trainer(HorovodStrategy(join=True), val_check_interval=2)
        with pytest.raises(ValueError, match="val_check_interval=2: leave it out"):
            made.fit(Net(), loader(), loader())

    ranks.run(train)
