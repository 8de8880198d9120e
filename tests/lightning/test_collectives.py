"""What a module and its callbacks ask the strategy for: logging, gathering, reducing, deciding."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tests.lightning.training import Net, fitted, loader, trainer
from tests.ranks import RankPool


class Logging(Net):
    """Logs what only its rank and batch say, with every reduction."""

    def training_step(self, batch: Any, index: int) -> Any:
        value = torch.tensor(10.0 * self.global_rank + index)
        for reduce_fx in ("mean", "sum", "min", "max"):
            self.log(
                reduce_fx, value, reduce_fx=reduce_fx, sync_dist=True, on_step=True, on_epoch=True
            )
        self.log("own", value, on_step=False, on_epoch=True)
        self.log_dict({"a": value, "b": -value}, sync_dist=True, on_step=False, on_epoch=True)
        return super().training_step(batch, index)


def test_every_reduction_of_what_is_logged(ranks: RankPool):
    def train() -> dict[str, float]:
        _, made = fitted(Logging(), max_epochs=1)
        return {name: value.item() for name, value in made.callback_metrics.items()}

    first, second = ranks.run(train)
    assert {k: v for k, v in first.items() if k != "own"} == {
        k: v for k, v in second.items() if k != "own"
    }
    # Eight batches with 0 to 7 on rank 0 and 10 to 17 on rank 1; the last step had 7 and 17.
    expected = {
        "mean_step": 12.0,
        "mean_epoch": 8.5,
        "sum_step": 24.0,
        "sum_epoch": 136.0,
        "min_step": 7.0,
        "min_epoch": 0.0,
        "max_step": 17.0,
        "max_epoch": 17.0,
        "a": 8.5,
        "b": -8.5,
    }
    assert expected.items() <= first.items()
    assert (first["own"], second["own"]) == (3.5, 13.5)


class Gathering(Net):
    """The loss has every rank's outputs in it."""

    def training_step(self, batch: Any, index: int) -> Any:
        self.mine = self(batch[0])
        everybodys = self.all_gather(self.mine, sync_grads=True)
        assert everybodys.shape == (2, *self.mine.shape)
        weights = torch.tensor([[[1.0]], [[3.0]]])
        self.mine.retain_grad()
        return (self.global_rank + 1) * (everybodys * weights).sum()

    def on_after_backward(self) -> None:
        self.seen = self.mine.grad.unique().tolist()


def test_all_gather_hands_gradients_back_to_everybody(ranks: RankPool):
    def train() -> Any:
        module = Gathering()
        fitted(module, max_epochs=1)
        with torch.no_grad():
            nested = module.all_gather({"x": torch.tensor(module.global_rank)})
        return module.seen, nested["x"].tolist()

    # Both ranks use it, weighted by 1 and 2: three times the weight of the part.
    assert ranks.run(train) == [([3.0], [0, 1]), ([9.0], [0, 1])]


def test_what_the_strategy_offers(ranks: RankPool):
    def ask() -> Any:
        strategy = fitted(Net(), max_epochs=1)[1].strategy
        rank = strategy.global_rank
        strategy.barrier("here")
        value = torch.tensor([1.0 + rank, 4.0])
        reduced = {op: strategy.reduce(value, reduce_op=op).tolist() for op in ("mean", "sum")}
        maximum = strategy.reduce(value, reduce_op=torch.distributed.ReduceOp.MAX).tolist()
        counts = strategy.reduce(torch.tensor(3 + rank), reduce_op="sum").item()
        return (
            strategy.broadcast({"from": rank}),
            strategy.broadcast({"from": rank}, src=1),
            reduced,
            maximum,
            counts,
            strategy.reduce("text"),
            value.tolist(),
            [
                strategy.reduce_boolean_decision(decision, all=every)
                for decision in (True, False, rank == 0)
                for every in (True, False)
            ],
        )

    for rank, found in enumerate(ranks.run(ask)):
        assert found == (
            {"from": 0},
            {"from": 1},
            {"mean": [1.5, 4.0], "sum": [3.0, 8.0]},
            [2.0, 4.0],
            7,
            "text",
            [1.0 + rank, 4.0],
            [True, True, False, False, False, True],
        )


def test_groups_of_another_library_are_refused(ranks: RankPool):
    def ask() -> str:
        strategy = trainer().strategy
        with pytest.raises(ValueError, match="process_set") as caught:
            strategy.reduce(torch.ones(1), group="mine")
        with pytest.raises(ValueError, match="reduce_op='median' is not known"):
            strategy.reduce(torch.ones(1), reduce_op="median")
        return str(caught.value)

    ranks.run(ask)


class Measuring(Net):
    """Logs metrics of torchmetrics, which keep counts of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.largest = torchmetrics.SumMetric(), torchmetrics.MaxMetric()
        self.all_values = torchmetrics.CatMetric()

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.update(len(batch[0]))
        self.largest.update(index + 100 * self.global_rank)
        self.all_values.update(torch.arange(1 + self.global_rank))
        self.log("seen", self.seen)
        self.log("largest", self.largest)

    def on_validation_epoch_end(self) -> None:
        self.count = len(self.all_values.compute())


def test_metrics_of_torchmetrics_count_all_ranks(ranks: RankPool):
    def measure() -> Any:
        module, made = Measuring(), trainer()
        (found,) = made.validate(module, loader(), verbose=False)
        assert module.seen.dist_sync_fn is None, "as before"
        return found, module.count

    for found, count in ranks.run(measure):
        assert found == {"seen": 64.0, "largest": 107.0}
        assert count == 8 * (1 + 2)  # of different lengths on the ranks


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_loggers_write_on_rank_0(ranks: RankPool, tmp_path: Path, kind: type):
    if kind is TensorBoardLogger:
        pytest.importorskip("tensorboard")

    def train() -> Any:
        logger: Any = kind(str(tmp_path), name="log")
        fitted(Logging(), max_epochs=1, logger=logger, log_every_n_steps=1)
        return logger.log_dir

    first, second = ranks.run(train)
    assert first == second
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["version_0"]
    if kind is CSVLogger:
        rows = list(csv.DictReader((Path(first) / "metrics.csv").open()))
        steps = [float(row["sum_step"]) for row in rows if row["sum_step"]]
        assert steps == [10.0 + 2 * index for index in range(8)]


def test_the_progress_bar_is_rank_0s(ranks: RankPool):
    def train() -> Any:
        _, made = fitted(Net(), max_epochs=1, enable_progress_bar=True)
        return made.progress_bar_callback.is_disabled

    assert ranks.run(train) == [False, True]


def test_collectives_in_inference_mode_leave_nothing_of_it_behind(ranks: RankPool):
    def ask() -> Any:
        strategy = trainer().strategy
        with torch.inference_mode():
            mine = torch.ones(5)
            found = (
                strategy.reduce(mine, reduce_op="sum"),
                strategy.all_gather(mine, sync_grads=True),
            )
            strategy.barrier()
            told = strategy.broadcast(mine.tolist())
        assert mine.is_inference()
        assert not any(tensor.is_inference() for tensor in found)
        return told, [tensor.sum().item() for tensor in found]

    assert ranks.run(ask) == [([1.0] * 5, [10.0, 10.0])] * 2
