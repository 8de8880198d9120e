"""Accumulation, clipping, precision, manual optimization: what happens to gradients, and when."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

import horovod.torch as hvd
from horovod.lightning import HorovodStrategy
from tests.lightning.training import Net, alone, assert_same, fitted, loader, trainer, weights
from tests.ranks import RankPool


class Counting(pl.Callback):
    """How many collective reductions of gradients there were, and what they left behind."""

    def __init__(self) -> None:
        self.reductions = 0
        self.norms: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        reducer = trainer.optimizers[0]._reducer
        finish = reducer.finish

        def counted() -> None:
            self.reductions += 1
            finish()

        reducer.finish = counted

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        gradients = [p.grad for p in trainer.lightning_module.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())


@pytest.mark.parametrize("by", ["trainer", "strategy"])
def test_accumulation_reduces_on_the_last_pass_only(ranks: RankPool, by: str):
    def train() -> Any:
        counting = Counting()
        options: dict[str, Any] = {"callbacks": [counting]}
        strategy: Any = HorovodStrategy(backward_passes_per_step=3)
        if by == "trainer":
            strategy, options["accumulate_grad_batches"] = "horovod", 3
        found, made = fitted(Net(), strategy, **options)
        return found, counting.reductions, counting.norms, made.global_step

    found = ranks.run(train)
    expected = alone(Net(), accumulate_grad_batches=3)
    assert_same([each[0] for each in found], expected)
    for _, reductions, norms, steps in found:
        assert reductions == steps == 6  # 8 batches in an epoch: 3, 3 and the remaining 2
        assert norms == found[0][2], "callbacks see reduced gradients"


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_comes_after_the_reduction(ranks: RankPool, algorithm: str):
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}

    def train() -> list[torch.Tensor]:
        return fitted(Net(), **options)[0]

    assert_same(ranks.run(train), alone(Net(), **options))


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_precision(ranks: RankPool, precision: Any):
    def train() -> list[torch.Tensor]:
        return fitted(Net(), precision=precision, max_epochs=1)[0]

    found, expected = ranks.run(train), alone(Net(), precision=precision, max_epochs=1)
    assert_same(found)
    tolerance = 1e-7 if precision == "64-true" else 0.02
    for one, other in zip(found[0], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        assert one.dtype == other.dtype


class Exploding(Net):
    """On the last rank the gradients of one step are infinite."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return loss * float("inf") if index == 2 and self.global_rank == 1 else loss


@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_infinity_on_one_rank_skips_the_step_on_all(ranks: RankPool, clip: float | None):
    def train() -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        module = Exploding()
        found, made = fitted(
            module,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
            max_epochs=1,
            gradient_clip_val=clip,
        )
        return found, scaler.get_scale(), made.global_step

    found = ranks.run(train)
    assert_same([each[0] for each in found])
    assert all(torch.isfinite(tensor).all() for tensor in found[0][0])
    assert [each[1:] for each in found] == [(32.0, 8)] * 2  # halved once, on both


class Adversaries(pl.LightningModule):
    """Two networks with an optimizer and a scheduler each, optimized by hand."""

    def __init__(self, toggled: bool, by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.one, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        self.toggled = toggled
        self.by_hand = by_hand

    def training_step(self, batch: Any, index: int) -> None:
        inputs, _ = batch
        first, second = self.optimizers()
        for optimizer, sign in ((first, 1.0), (second, -1.0)):
            if self.toggled:
                self.toggle_optimizer(optimizer)
            loss = sign * self.other(torch.tanh(self.one(inputs))).square().mean()
            optimizer.zero_grad()
            if self.by_hand:
                loss.backward()
            else:
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            if self.toggled:
                self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.one.parameters(), lr=0.02)
        second = torch.optim.SGD(self.other.parameters(), lr=0.05)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 3) for each in (first, second)]
        return [first, second], schedulers


@pytest.mark.parametrize("toggled", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_manual_optimization_of_several(ranks: RankPool, toggled: bool, by_hand: bool):
    def train() -> Any:
        module = Adversaries(toggled, by_hand)
        found, made = fitted(module)
        return found, [each["lr"] for each in made.optimizers[1].param_groups]

    found = ranks.run(train)
    assert_same([each[0] for each in found], alone(Adversaries(toggled, by_hand)))
    assert found[0][1] == found[1][1] == [pytest.approx(0.05 * 0.1**5)]


class ByHand(Net):
    """Accumulates two backward passes and steps, in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.way = way

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        last = index % 2 == 1
        if index % 2 == 0:
            optimizer.zero_grad()
        if self.way == "blocked" and not last:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss(batch) / 2)
        else:
            self.manual_backward(self.loss(batch) / 2)
        if last:
            optimizer.step()


@pytest.mark.parametrize("way", ["every pass", "blocked", "announced"])
def test_manual_accumulation(ranks: RankPool, way: str):
    def train() -> Any:
        passes = 2 if way == "announced" else 1
        counting = Counting()
        strategy = HorovodStrategy(backward_passes_per_step=passes)
        found, _ = fitted(ByHand(way), strategy, callbacks=[counting])
        return found, counting.reductions

    found = ranks.run(train)
    expected = alone(Net(), accumulate_grad_batches=2)
    assert_same([each[0] for each in found], expected)
    assert found[0][1] == (16 if way == "every pass" else 8)


def test_schedulers_go_on_with_the_steps(ranks: RankPool):
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=16)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train() -> list[torch.Tensor]:
        return fitted(Scheduled())[0]

    assert_same(ranks.run(train), alone(Scheduled()))


def test_an_optimizer_that_the_module_wrapped_itself_stays(ranks: RankPool):
    class Wrapped(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return hvd.DistributedOptimizer(optimizer, self.named_parameters())

    def train() -> list[torch.Tensor]:
        return fitted(Wrapped())[0]

    assert_same(ranks.run(train), alone(Net()))


def test_no_optimizer(ranks: RankPool):
    class Idle(Net):
        def configure_optimizers(self) -> None:
            return None

    def train() -> bool:
        module = Idle()
        before = weights(module)
        made = trainer(max_epochs=1)
        made.fit(module, loader())
        return all(map(torch.equal, before, weights(module)))

    assert ranks.run(train) == [True, True]
