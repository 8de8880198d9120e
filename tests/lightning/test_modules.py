"""Modules of all kinds: compiled, made late, with batch normalisation, with parameters unused."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
)

import horovod.torch as hvd
from tests.lightning.training import (
    FEATURES,
    QUIET,
    Net,
    alone,
    assert_same,
    fitted,
    loader,
    trainer,
    weights,
)
from tests.ranks import RankPool


@pytest.mark.parametrize("kind", [BoringModel, ManualOptimBoringModel])
def test_lightnings_demo_models(ranks: RankPool, kind: type):
    def run() -> Any:
        torch.manual_seed(hvd.rank())
        module, made = kind(), trainer(max_epochs=1, limit_train_batches=4)
        made.fit(module, datamodule=BoringDataModule())
        made.validate(module, datamodule=BoringDataModule(), verbose=False)
        made.test(module, datamodule=BoringDataModule(), verbose=False)
        return weights(module), len(made.predict(module, datamodule=BoringDataModule()))

    found = ranks.run(run)
    assert_same([each[0] for each in found])
    assert [each[1] for each in found] == [32, 32]


def test_lightnings_demo_model_with_hyperparameters(ranks: RankPool):
    def run() -> Any:
        module, made = DemoModel(out_dim=10, learning_rate=0.02), trainer(max_epochs=1)
        made.fit(module, torch.utils.data.DataLoader(torch.randn(16, 32), batch_size=2))
        return weights(module), made.optimizers[0].param_groups[0]["lr"]

    found = ranks.run(run)
    assert_same([each[0] for each in found])
    assert found[0][1] == 0.02


def test_sync_batchnorm_is_horovods_while_training(ranks: RankPool):
    class Looking(Net):
        def on_train_start(self) -> None:
            self.seen = type(self.net[1])

    def train() -> Any:
        module = Looking(batch_norm=True)
        layer = module.net[1]
        found = fitted(module, sync_batchnorm=True)[0]
        assert module.seen is hvd.SyncBatchNorm
        assert module.net[1] is layer, "put back"
        assert layer.running_mean.abs().sum() > 0
        return found

    assert_same(ranks.run(train), alone(Net(batch_norm=True)))


def test_without_sync_batchnorm_statistics_are_rank_0s_when_they_are_used(ranks: RankPool):
    class Looking(Net):
        def __init__(self) -> None:
            super().__init__(batch_norm=True)
            self.means: dict[str, list[torch.Tensor]] = {"training": [], "validation": []}

        def training_step(self, batch: Any, index: int) -> Any:
            self.means["training"].append(self.net[1].running_mean.clone())
            return super().training_step(batch, index)

        def on_validation_epoch_start(self) -> None:
            self.means["validation"].append(self.net[1].running_mean.clone())

    def train() -> Any:
        module = Looking()
        trainer().fit(module, loader(), loader())
        return weights(module), module.means

    first, second = ranks.run(train)
    assert_same([first[0], second[0]])
    assert_same([first[1]["validation"], second[1]["validation"]])
    assert not all(map(torch.equal, first[1]["training"], second[1]["training"]))


def test_compiled_modules(ranks: RankPool):
    def train() -> list[torch.Tensor]:
        module = Net()
        made = trainer(max_epochs=1)
        made.fit(torch.compile(module, backend="aot_eager"), loader())
        return weights(module)

    assert_same(ranks.run(train, timeout=200), alone(Net(), max_epochs=1))


class Late(Net):
    """The network is made when the devices are known."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.net = self.net, None

    def configure_model(self) -> None:
        if self.net is None:
            self.net, self.made = self.made, None


def test_configure_model(ranks: RankPool):
    def train() -> list[torch.Tensor]:
        module = Late()
        return fitted(module)[0]

    assert_same(ranks.run(train), alone(Net()))


class Choosing(Net):
    """A layer that only some ranks use in a step, and one that nobody ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = torch.nn.Linear(FEATURES, 1)
        self.never = torch.nn.Linear(3, 3)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.net(inputs)
        if inputs[0, 0] > 0:
            outputs = outputs + self.sometimes(inputs)
        return outputs


def test_parameters_that_are_unused_on_some_ranks_or_on_all(ranks: RankPool):
    def train() -> Any:
        module = Choosing()
        kept = [p.detach().clone() for p in (*module.never.parameters(), module.frozen.weight)]
        found = fitted(module)[0]
        now = [*module.never.parameters(), module.frozen.weight]
        return found, all(map(torch.equal, kept, now))

    found = ranks.run(train)
    assert_same([each[0] for each in found])
    assert [each[1] for each in found] == [True, True]


def test_extra_state_of_a_module_is_rank_0s(ranks: RankPool):
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = hvd.rank() + 5

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    class Counted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.counter = Counter()

    def train() -> int:
        module = Counted()
        trainer(max_epochs=1).fit(module, loader())
        return module.counter.count

    assert ranks.run(train) == [5, 5]


def test_groups_added_through_lightnings_wrapper_are_reduced(ranks: RankPool):
    class Growing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.more = torch.nn.Linear(FEATURES, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) + self.more(inputs)

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            if index == 2 and self.current_epoch == 0:
                optimizer.add_param_group({"params": list(self.more.parameters())})
            optimizer.zero_grad()
            self.more.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train() -> list[torch.Tensor]:
        return fitted(Growing())[0]

    assert_same(ranks.run(train), alone(Growing()))


def test_one_process_without_a_launcher_is_a_plain_trainer():
    made = pl.Trainer(strategy="horovod", max_epochs=2, accelerator="cpu", **QUIET)
    module = Net()
    made.fit(module, loader())
    assert made.world_size == 1
    reference = Net()
    plain = trainer("auto", devices=1)
    shuffled = torch.utils.data.DataLoader(
        made.train_dataloader.dataset, 4, sampler=made.train_dataloader.sampler
    )
    plain.fit(reference, shuffled)
    assert_same([weights(module), weights(reference)])
