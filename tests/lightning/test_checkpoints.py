"""Checkpoints: rank 0 writes and reads; all ranks go on where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import horovod.torch as hvd
from horovod.lightning import HorovodStrategy
from tests.lightning.training import Net, alone, assert_same, fitted, loader, trainer, weights
from tests.ranks import RankPool


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.parametrize("sharded", [False, True])
def test_rank_0_writes_and_everybody_resumes(ranks: RankPool, tmp_path: Path, sharded: bool):
    def begin() -> Any:
        saving = ModelCheckpoint(tmp_path / f"rank{hvd.rank()}", save_last=True)
        strategy = HorovodStrategy(shard_state=sharded)
        made = trainer(strategy, max_epochs=2, enable_checkpointing=True, callbacks=[saving])
        made.fit(Scheduled(), loader())
        return saving.last_model_path

    def resume(path: str) -> Any:
        module = Scheduled(seed=9)
        made = trainer(HorovodStrategy(shard_state=sharded), max_epochs=4)
        # The others do not even have a file of that name.
        made.fit(module, loader(), ckpt_path=path if hvd.rank() == 0 else "/nowhere/last.ckpt")
        rate = made.optimizers[0].param_groups[0]["lr"]
        return weights(module), made.current_epoch, made.global_step, rate

    paths = ranks.run(begin)
    assert paths[0] == paths[1], "all name the file of rank 0"
    assert [each.name for each in tmp_path.iterdir()] == ["rank0"]
    found = ranks.run(resume, paths[0])
    assert_same([each[0] for each in found], alone(Scheduled(), max_epochs=4))
    assert [each[1:] for each in found] == [(4, 32, pytest.approx(0.02 * 0.5**4))] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_the_file_is_an_ordinary_one(ranks: RankPool, tmp_path: Path, sharded: bool):
    def save() -> Any:
        found, made = fitted(Net(), HorovodStrategy(shard_state=sharded))
        made.save_checkpoint(tmp_path / "model.ckpt")
        return found

    found = ranks.run(save)
    content = torch.load(tmp_path / "model.ckpt", weights_only=False)
    assert content["global_step"] == 16
    (state,) = content["optimizer_states"]
    assert [tuple(each["momentum_buffer"].shape) for each in state["state"].values()] == [
        tuple(weight.shape) for weight in found[0]
    ]
    module = Net(seed=5)
    trainer("auto", devices=1).validate(
        module, loader(), ckpt_path=tmp_path / "model.ckpt", verbose=False
    )
    assert_same([weights(module), found[0]])


def test_a_checkpoint_that_cannot_be_read_is_an_error_on_all_ranks(ranks: RankPool, tmp_path: Path):
    def resume() -> str:
        made = trainer()
        with pytest.raises((FileNotFoundError, RuntimeError)) as caught:
            made.fit(Net(), loader(), ckpt_path=tmp_path / "missing.ckpt")
        return f"{type(caught.value).__name__}: {caught.value}"

    first, second = ranks.run(resume)
    assert "missing.ckpt" in first
    assert "the first rank could not read the checkpoint: FileNotFoundError" in second


def test_validate_with_the_best_checkpoint(ranks: RankPool, tmp_path: Path):
    def train() -> Any:
        saving = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2)
        made = trainer(enable_checkpointing=True, callbacks=[saving], max_epochs=3)
        made.fit(Net(), loader(), loader())
        (validated,) = made.validate(ckpt_path="best", dataloaders=loader(), verbose=False)
        return saving.best_model_path, saving.best_model_score.item(), validated["val_loss"]

    first, second = ranks.run(train)
    assert first == second
    assert first[1] == pytest.approx(first[2])
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
