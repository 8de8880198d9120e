"""Elastic training: a fit that goes on from the last commit, as if nothing had happened."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.lightning.elastic import CommitCallback, TrainerState
from horovod.lightning.elastic.state import EpochSampler
from tests.lightning.training import Net, dataset, loader, trainer, weights
from tests.ranks import RankPool

SAMPLES = 60  # of each rank 30, in 8 batches of which the last is not full


class Noting(Net):
    """Knows the samples that it was trained on, by epoch, and what it was told of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []
        self.indices: list[int] = []
        self.validated: list[int] = []  # epochs

    def on_validation_end(self) -> None:
        self.validated.append(self.current_epoch)

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen += [(self.current_epoch, x.sum().item()) for x in batch[0]]
        self.indices.append(index)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class FailingOnce(pl.Callback):
    """Raises what a lost peer raises, before the batches with these numbers in all."""

    def __init__(self, *batches: int) -> None:
        self.batches = list(batches)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.batches and trainer.fit_loop.total_batch_idx == self.batches[0]:
            self.batches.pop(0)
            raise HorovodInternalError("a rank was lost")


def train(fail_at: tuple[int, ...], per_commit: int, options: dict[str, Any]) -> Any:
    """Fit until it succeeds, as `hvd.elastic.run` does; what came of it."""
    module = Noting()
    state, failing = TrainerState(module), FailingOnce(*fail_at)
    attempts = 0
    while True:
        attempts += 1
        commits = CommitCallback(state, batches_per_commit=per_commit)
        made = trainer(callbacks=[failing, commits], **{"max_epochs": 3, **options})
        try:
            made.fit(module, loader(samples=SAMPLES), loader(), ckpt_path=state.checkpoint)
            break
        except HorovodInternalError:
            state.restore()
    facts = made.current_epoch, made.global_step, made.optimizers[0].param_groups[0]["lr"]
    return weights(module), facts, attempts, module.seen, module.indices


CASES = [
    ((5,), 1, {}),
    ((3, 11, 17), 2, {}),
    ((0,), 1, {}),  # before anything is done
    ((8, 16), 1, {}),  # at the beginning of an epoch
    ((13,), 100, {}),  # with commits before epochs only
    ((5, 12), 3, {"accumulate_grad_batches": 2}),
    ((9, 13), 2, {"max_epochs": -1, "max_steps": 20}),
]


@pytest.mark.parametrize(("fail_at", "per_commit", "options"), CASES)
def test_a_fit_goes_on_as_if_nothing_had_happened(
    ranks: RankPool, fail_at: tuple[int, ...], per_commit: int, options: dict[str, Any]
):
    smooth = ranks.run(train, (), per_commit, options)
    rough = ranks.run(train, fail_at, per_commit, options)
    for before, after in zip(smooth, rough, strict=True):
        assert all(map(torch.equal, before[0], after[0])), "other weights"
        assert before[1] == after[1]
        assert (before[2], after[2]) == (1, 1 + len(fail_at))
        assert set(before[3]) == set(after[3]), "other samples"
    if per_commit == 1:  # nothing is repeated
        assert [sorted(each[3]) for each in smooth] == [sorted(each[3]) for each in rough]
        assert smooth[0][4] == rough[0][4] == list(range(8)) * 3


def test_every_sample_of_every_epoch_is_used(ranks: RankPool):
    found = ranks.run(train, (4, 13), 1, {})
    everything = sorted(round(x.sum().item(), 4) for x, _ in dataset(SAMPLES))
    for epoch in range(3):
        seen = [round(value, 4) for each in found for when, value in each[3] if when == epoch]
        assert sorted(seen) == everything


def train_as_ranks_change(places: list[tuple[int, int]], fail_at: int) -> Any:
    """A fit by all ranks that share out the data as if there were others of them each time."""
    module = Noting()
    state, failing = TrainerState(module), FailingOnce(fail_at)
    for place in places:
        callbacks = [failing, CommitCallback(state)]
        made = trainer(callbacks=callbacks, max_epochs=5, num_sanity_val_steps=0)
        with mock.patch.object(EpochSampler, "_place", lambda self, place=place: place):
            try:
                made.fit(module, loader(samples=SAMPLES), loader(), ckpt_path=state.checkpoint)
            except HorovodInternalError:
                state.restore()
    counts = [sum(epoch == number for epoch, _ in module.seen) for number in range(5)]
    return counts, module.validated, made.reload_dataloaders_every_n_epochs


ALONE, IN_TWO = (0, 1), (0, 2)  # the first rank of that many


@pytest.mark.parametrize(
    ("places", "fail_at", "samples"),
    [
        ([IN_TWO, ALONE], 11, [30, 3 * 4 + (60 - 2 * 3 * 4), 60, 60, 60]),
        ([ALONE, IN_TWO], 26, [60, 11 * 4 + (60 - 11 * 4) // 2, 30, 30, 30]),
        ([ALONE, IN_TWO], 15, [60, 30, 30, 30, 30]),  # where an epoch begins
        ([IN_TWO, ALONE], 35, [30, 30, 30, 30, 3 * 4 + (60 - 2 * 3 * 4)]),  # in the last one
    ],
)
def test_epochs_after_ranks_have_changed_are_whole(
    ranks: RankPool, places: list[tuple[int, int]], fail_at: int, samples: list[int]
):
    """What is left of the epoch in which they changed has a length of its own."""
    found = ranks.run(train_as_ranks_change, places, fail_at)
    assert found == [(samples, [0, 1, 2, 3, 4], 0)] * 2


def test_the_rest_of_an_epoch_is_divided_among_fewer_ranks(monkeypatch: pytest.MonkeyPatch):
    place = (0, 2)
    monkeypatch.setattr(EpochSampler, "_place", lambda self: place)
    sampler = EpochSampler(range(40), True, 7, batch_size=4)
    assert len(sampler) == 20
    first = list(sampler)[:8]
    sampler.record()
    sampler.record()
    assert len(sampler) == 20, "it does not change during an epoch"
    state = sampler.state_dict()

    place = (0, 1)  # one is left
    other = EpochSampler(range(40), True, 7, batch_size=4)
    other.load_state_dict(state)
    rest = list(other)
    assert len(rest) == 40 - 2 * 2 * 4
    assert not set(rest) & set(first)
    assert len(other) == 2 * 4 + len(rest)  # two batches are done, as a Trainer counts them
    other.set_epoch(0)
    assert list(other) == rest, "Lightning says which epoch it is, also when it goes on"
    other.set_epoch(1)
    assert len(other) == 40


def test_data_that_lightning_does_not_divide_is_committed_by_epochs(ranks: RankPool):
    def run() -> Any:
        state = TrainerState(module := Net())
        commits: list[bool] = []
        commit_at = state.commit_at
        state.commit_at = lambda epoch_start: (commits.append(epoch_start), commit_at(epoch_start))
        callbacks = [CommitCallback(state)]
        trainer(callbacks=callbacks, use_distributed_sampler=False).fit(module, loader())
        return commits, state.checkpoint is not None

    assert ranks.run(run) == [([True, True], True)] * 2


def test_the_callback_says_what_it_needs():
    with pytest.raises(ValueError, match="batches_per_commit must be positive, not 0"):
        CommitCallback(TrainerState(Net()), 0)
    made = trainer("auto", devices=1, callbacks=[CommitCallback(TrainerState(Net()))])
    with pytest.raises(ValueError, match=r"needs Trainer\(strategy='horovod'\)"):
        made.fit(Net(), loader())


def test_before_the_first_commit_the_weights_come_back():
    module = Net()
    state, before = TrainerState(module), weights(module)
    with torch.no_grad():
        module.net[0].weight.zero_()
    state.restore()
    assert all(map(torch.equal, before, weights(module)))
    assert state.checkpoint is None
