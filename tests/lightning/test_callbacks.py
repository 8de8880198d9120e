"""Lightning's own callbacks, whose decisions must be the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import horovod.torch as hvd
from tests.lightning.training import (
    BATCH,
    BothRanks,
    Net,
    alone,
    assert_same,
    dataset,
    fitted,
    loader,
    trainer,
    weights,
)
from tests.ranks import RankPool


class Judged(Net):
    """Rank 1 sees a metric that gets worse, rank 0 one that does not change."""

    def validation_step(self, batch: Any, index: int) -> None:
        worse = float(self.current_epoch * self.global_rank)
        self.log("judged", torch.tensor(worse), sync_dist=True)
        self.log("own", torch.tensor(worse))


@pytest.mark.parametrize("monitored", ["judged", "own"])
def test_early_stopping_is_decided_alike(ranks: RankPool, monitored: str):
    def train() -> Any:
        stopping = EarlyStopping(monitored, patience=2)
        made = trainer(max_epochs=9, callbacks=[stopping])
        made.fit(Judged(), loader(), loader())
        return made.current_epoch, stopping.stopped_epoch

    first, second = ranks.run(train)
    assert first == second
    assert first[0] < 9


def test_a_callback_that_stops_on_one_rank_only_stops_nobody_else_in_a_wait(ranks: RankPool):
    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            wish = hvd.rank() == 1 and trainer.current_epoch == 1
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(wish, all=False)

    def train() -> int:
        made = trainer(max_epochs=9, callbacks=[Stop()])
        made.fit(Net(), loader())
        return made.current_epoch

    assert ranks.run(train) == [2, 2]


def test_monitors_of_learning_rate_device_and_time(ranks: RankPool, tmp_path: Path):
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def train(strategy: str = "horovod", folder: str = "ours") -> Any:
        rates = LearningRateMonitor(logging_interval="epoch")
        callbacks = [rates, DeviceStatsMonitor(cpu_stats=True), Timer({"hours": 1})]
        logger = CSVLogger(tmp_path / folder)
        made = trainer(strategy, callbacks=callbacks, logger=logger, log_every_n_steps=1)
        made.fit(Scheduled(), loader())
        return rates.lrs

    first, second = ranks.run(train)
    assert first == second == train("auto", "alone")
    (path,) = tmp_path.glob("ours/**/metrics.csv")
    assert "DeviceStatsMonitor.on_train_batch_end/cpu_percent" in path.read_text()


@pytest.mark.parametrize("batch_norm", [False, True])
def test_stochastic_weight_averaging(ranks: RankPool, batch_norm: bool):
    def train() -> Any:
        averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
        made = trainer(max_epochs=4, callbacks=[averaging])
        module = Net(batch_norm=batch_norm)
        made.fit(module, loader())
        return weights(module), made.current_epoch

    found = ranks.run(train)
    assert found[0][1] == found[1][1]
    assert_same([each[0] for each in found])
    if batch_norm:  # without sync_batchnorm each rank normalises by its own data
        return
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    assert_same([each[0] for each in found], alone(Net(), max_epochs=4, callbacks=[averaging]))


class Backbone(Net):
    """The first layer is the backbone that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.backbone(inputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def test_finetuning_adds_groups_of_parameters(ranks: RankPool):
    def options() -> dict[str, Any]:
        unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05)
        return {"max_epochs": 3, "callbacks": [unfreezing]}

    def train() -> Any:
        module = Backbone()
        before = module.backbone[0].weight.detach().clone()
        found, made = fitted(module, **options())
        moved = not torch.equal(before, module.backbone[0].weight)
        return found, len(made.optimizers[0].param_groups), moved

    found = ranks.run(train)
    assert [each[1:] for each in found] == [(2, True)] * 2
    assert_same([each[0] for each in found], alone(Backbone(), **options()))


def test_accumulation_that_changes_with_the_epochs(ranks: RankPool):
    def train() -> Any:
        return fitted(Net(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})])[0]

    expected = alone(Net(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})])
    assert_same(ranks.run(train), expected)


def test_the_reference_meets_the_batches_of_both_ranks():
    data = dataset(16)
    made = DataLoader(data, 2 * BATCH, sampler=BothRanks(data, BATCH))
    seen = torch.cat([inputs for inputs, _ in made])
    assert sorted(seen.sum(1).tolist()) == sorted(data.tensors[0].sum(1).tolist())
