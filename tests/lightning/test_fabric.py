"""Fabric: setup, backward, accumulation, clipping, collectives, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch.nn import functional as F
from torch.utils.data import DataLoader

import horovod.torch as hvd
from horovod.lightning import HorovodFabricStrategy
from tests.lightning.training import BATCH, BothRanks, assert_same, dataset, weights
from tests.ranks import RankPool


def make(optimizer: Any = None, seed: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    build = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    return model, build(model.parameters())


def fabric(strategy: Any = "horovod", **options: Any) -> Fabric:
    made = Fabric(accelerator="cpu", strategy=strategy, **options)
    made.launch()
    return made


def train(
    made: Fabric,
    model: Any,
    optimizer: Any,
    loader: Any,
    accumulate: int = 1,
    clip: dict[str, float] | None = None,
    epochs: int = 2,
) -> None:
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(loader):
            waits = (index + 1) % accumulate != 0
            if index % accumulate == 0:
                optimizer.zero_grad()
            with made.no_backward_sync(model, enabled=waits):
                made.backward(F.mse_loss(model(inputs), targets) / accumulate)
            if not waits:
                if clip is not None:
                    made.clip_gradients(model, optimizer, **clip)
                optimizer.step()


def together(made: Fabric, **options: Any) -> list[torch.Tensor]:
    model, optimizer = made.setup(*make(seed=1 + hvd.rank()))
    loader = made.setup_dataloaders(DataLoader(dataset(), BATCH, shuffle=True))
    train(made, model, optimizer, loader, **options)
    return weights(model)


def alone(**options: Any) -> list[torch.Tensor]:
    made = Fabric(accelerator="cpu", devices=1)
    model, optimizer = made.setup(*make())
    data = dataset()
    loader = made.setup_dataloaders(DataLoader(data, 2 * BATCH, sampler=BothRanks(data, BATCH)))
    train(made, model, optimizer, loader, **options)
    return weights(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        {"clip": {"max_norm": 0.05}},
        {"clip": {"clip_val": 0.01}},
        {"accumulate": 4, "clip": {"max_norm": 0.05}},
    ],
)
def test_training_is_what_one_process_does(ranks: RankPool, options: dict[str, Any]):
    def run() -> list[torch.Tensor]:
        return together(fabric(), **options)

    assert_same(ranks.run(run), alone(**options))


def test_options_of_the_optimizer(ranks: RankPool):
    def run() -> list[torch.Tensor]:
        return together(fabric(HorovodFabricStrategy(shard_state=True, groups=2)))

    assert_same(ranks.run(run), alone())


def test_accumulation_exchanges_nothing_on_the_way(ranks: RankPool):
    def run() -> int:
        made = fabric()
        model, optimizer = made.setup(*make())
        count, finish = 0, optimizer._reducer.finish

        def counted() -> None:
            nonlocal count
            count += 1
            finish()

        optimizer._reducer.finish = counted
        loader = made.setup_dataloaders(DataLoader(dataset(), BATCH))
        train(made, model, optimizer, loader, accumulate=4, epochs=1)
        return count

    assert ranks.run(run) == [2, 2]  # of 8 batches


def test_a_scaler_skips_alike(ranks: RankPool):
    def run() -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        made = fabric(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        model, optimizer = made.setup(*make())
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).square().mean()
            made.backward(loss * float("inf") if step == 1 and hvd.rank() == 1 else loss)
            made.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
        return weights(model), scaler.get_scale()

    found = ranks.run(run)
    assert_same([each[0] for each in found])
    assert [each[1] for each in found] == [32.0, 32.0]


def test_module_and_optimizer_set_up_one_after_the_other_and_a_closure(ranks: RankPool):
    def run(strategy: Any = "horovod") -> list[torch.Tensor]:
        made = fabric(strategy, precision="64-true", devices="auto" if strategy else 1)
        model, optimizer = make(lambda p: torch.optim.LBFGS(p, max_iter=3))
        model = made.setup_module(model)
        optimizer = made.setup_optimizers(torch.optim.LBFGS(model.parameters(), max_iter=3))
        both = torch.stack([each[0] for each in list(dataset())[:8]]).double()
        mine = both[hvd.rank() * 4 :][:4] if made.world_size > 1 else both

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(mine) - 1).square().mean()
            made.backward(loss)
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return weights(model)

    hvd.init()
    assert_same(ranks.run(run), run())


def test_collectives(ranks: RankPool):
    def run() -> Any:
        made = fabric()
        rank = made.global_rank
        made.barrier()
        value = torch.tensor([1.0 + rank])
        reduced = made.all_reduce({"x": value}, reduce_op="sum")["x"]
        gathered = made.all_gather(torch.tensor([rank]))
        with made.rank_zero_first():
            pass
        return (
            made.world_size,
            rank,
            reduced.item(),
            value.item(),
            gathered.tolist(),
            made.broadcast(f"from {rank}", src=1),
            made.strategy.reduce_boolean_decision(rank == 0, all=False),
        )

    for rank, found in enumerate(ranks.run(run)):
        # Fabric promises to reduce in place.
        assert found == (2, rank, 3.0, 3.0, [[0], [1]], "from 1", True)


@pytest.mark.parametrize("sharded", [False, True])
def test_save_and_load(ranks: RankPool, tmp_path: Path, sharded: bool):
    path = tmp_path / "state.ckpt"

    def run() -> Any:
        made = fabric(HorovodFabricStrategy(shard_state=sharded))

        def train_on(model: Any, optimizer: Any) -> None:
            loader = made.setup_dataloaders(DataLoader(dataset(), BATCH, shuffle=True))
            train(made, model, optimizer, loader, epochs=1)

        model, optimizer = made.setup(*make())
        train_on(model, optimizer)
        made.save(path, {"model": model, "optimizer": optimizer, "epoch": 1 + made.global_rank})
        train_on(model, optimizer)
        straight = weights(model)

        again, other = made.setup(*make(seed=7))
        state: dict[str, Any] = {"model": again, "optimizer": other, "epoch": 0}
        seen = path if made.global_rank == 0 else Path("/nowhere")
        rest = made.load(seen, state)
        train_on(again, other)
        return straight, weights(again), state["epoch"], rest

    for straight, resumed, epoch, rest in ranks.run(run):
        assert_same([straight, resumed])
        assert (epoch, rest) == (1, {})


def test_two_models_with_an_optimizer_each(ranks: RankPool):
    def run() -> Any:
        made = fabric()
        one, first = made.setup(*make())
        other, second = made.setup(*make(seed=2))
        for step in range(4):
            torch.manual_seed(2 * step + made.global_rank)
            inputs = torch.randn(4, 8)
            for model, optimizer in ((one, first), (other, second)):
                optimizer.zero_grad()
                made.backward(model(inputs).square().mean())
                optimizer.step()
            second.zero_grad()
            first.zero_grad()
            made.backward((one(inputs) * other(inputs)).mean())
            first.step()
        return weights(one) + weights(other)

    assert_same(ranks.run(run))


def test_join_is_for_the_trainer():
    with pytest.raises(ValueError, match=r"hvd\.join\(\)"):
        HorovodFabricStrategy(join=True)
