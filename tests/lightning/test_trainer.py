"""fit, validate, test and predict: the ranks agree with each other and with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.lightning import HorovodStrategy
from tests.lightning.training import (
    BATCH,
    SAMPLES,
    Net,
    alone,
    assert_same,
    fitted,
    loader,
    trainer,
    weights,
)
from tests.ranks import RankPool

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit_is_what_one_process_does_with_the_whole_batch(ranks: RankPool, name: str):
    # A line search makes much of the last bit, so it needs more of them.
    precision: Any = "64-true" if name == "LBFGS" else "32-true"

    def train() -> list[torch.Tensor]:
        module = Net(OPTIMIZERS[name], seed=1 + hvd.rank())  # rank 0's weights count
        return fitted(module, precision=precision)[0]

    assert_same(ranks.run(train), alone(Net(OPTIMIZERS[name]), precision=precision))


def test_validate_test_and_predict(ranks: RankPool):
    def evaluate() -> Any:
        module, made = Net(seed=1 + hvd.rank()), trainer()
        validated = made.validate(module, loader(), verbose=False)
        tested = made.test(module, loader(), verbose=False)
        predicted = torch.cat(made.predict(module, loader(shuffle=False)))
        return validated, tested, predicted, weights(module)

    module, made = Net(), trainer("auto", devices=1)
    expected = made.validate(module, loader(), verbose=False)[0]["val_loss"]
    outputs = torch.cat(made.predict(module, loader()))
    (first, second) = ranks.run(evaluate)
    for validated, tested, _, _ in (first, second):
        assert validated[0]["val_loss"] == pytest.approx(expected)
        assert tested[0]["test_loss"] == pytest.approx(expected)
    assert_same([first[3], second[3]], weights(module))  # of rank 0, also without training
    together = torch.stack([first[2], second[2]], dim=1).reshape(SAMPLES, 1)
    torch.testing.assert_close(together, outputs)


def test_fit_several_times_and_nothing_is_left_behind(ranks: RankPool):
    def train() -> Any:
        module = Net()
        for _ in range(3):
            made = trainer(max_epochs=1)
            made.fit(module, loader())
            assert type(made.optimizers[0]) is torch.optim.SGD, "as configure_optimizers made it"
            for param in module.parameters():
                assert not param._post_accumulate_grad_hooks
            assert all("Watcher" not in type(each).__name__ for each in made.callbacks)
        made.fit_loop.max_epochs = 3
        made.fit(module, loader())
        return weights(module), made.current_epoch, made.optimizers[0].state_dict()["state"] != {}

    (first, second) = ranks.run(train)
    assert first[1:] == second[1:] == (3, True)
    assert_same([first[0], second[0]])


def test_old_optimizers_and_modules_are_freed(ranks: RankPool):
    def leftovers() -> int:
        import gc

        from horovod.torch.optimizers.reducing import _optimizers

        gc.collect()
        before = len(_optimizers)
        for _ in range(2):
            fitted(Net(), max_epochs=1)
        gc.collect()
        return len(_optimizers) - before

    assert ranks.run(leftovers) == [0, 0]


def test_devices_and_sampler_are_the_jobs(ranks: RankPool):
    def look() -> Any:
        seen = []
        for devices in ("auto", 1, 2):
            _, made = fitted(Net(), max_epochs=1, devices=devices)
            sampler = made.train_dataloader.sampler
            seen.append(
                (made.world_size, made.num_training_batches, sampler.num_replicas, sampler.rank)
            )
        return made.global_rank, made.local_rank, made.node_rank, made.num_nodes, seen

    for rank, found in enumerate(ranks.run(look)):
        batches = SAMPLES // BATCH // 2
        assert found == (rank, rank, 0, 1, [(2, batches, 2, rank)] * 3)


def test_a_custom_strategy_object_and_its_options(ranks: RankPool):
    def train(options: dict[str, Any]) -> list[torch.Tensor]:
        return fitted(Net(), HorovodStrategy(**options))[0]

    expected = alone(Net())
    for options in (
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"shard_state": True},
        {"sparse_as_dense": True},
    ):
        assert_same(ranks.run(train, options), expected)


def test_options_that_change_the_numbers(ranks: RankPool):
    def train(kind: str) -> Any:
        from horovod.torch import hooks

        options: dict[str, Any] = {
            "fp16": {"compression": hvd.Compression.fp16},
            "sum": {"op": hvd.Sum},
            "adasum": {"op": hvd.Adasum},
            "hook": {"communication_hook": hooks.BF16()},
        }[kind]
        return fitted(Net(), HorovodStrategy(**options), max_epochs=1)[0]

    expected = alone(Net(), max_epochs=1)
    for kind in ("fp16", "hook"):
        found = ranks.run(train, kind)
        assert_same(found)
        for one, other in zip(found[0], expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)
    doubled = Net(lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9))  # op=Sum: twice the gradient
    assert_same(ranks.run(train, "sum"), alone(doubled, max_epochs=1))
    assert_same(ranks.run(train, "adasum"))


def test_groups_of_parameters_and_a_process_set_of_one_rank(ranks: RankPool):
    def train() -> Any:
        module = Net()
        groups = [list(module.net[0].parameters()), list(module.net[2].parameters())]
        grouped = fitted(module, HorovodStrategy(groups=groups))[0]
        alone_ = hvd.add_process_set([1])
        try:
            strategy = HorovodStrategy(process_set=alone_)
            _, made = fitted(Net(), strategy, max_epochs=1)
            place = made.world_size, made.global_rank, made.num_training_batches
        finally:
            hvd.remove_process_set(alone_)
        return grouped, place

    found = ranks.run(train)
    assert_same([each[0] for each in found], alone(Net()))
    assert [each[1] for each in found] == [(1, 0, SAMPLES // BATCH)] * 2


def test_every_option_of_the_optimizer_is_one_of_the_strategy():
    import inspect

    theirs = set(inspect.signature(hvd.DistributedOptimizer).parameters)
    ours = set(inspect.signature(HorovodStrategy.__init__).parameters)
    # A Trainer looks at complete gradients after backward: nothing is left for the next forward.
    # The strategy shares buffers by itself, before validation and at the end.
    not_options = {"optimizer", "named_parameters", "overlap_forward", "average_buffers"}
    assert theirs - not_options <= ours


@pytest.mark.parametrize("local_steps", [1, 3])
def test_local_steps_end_with_equal_models(ranks: RankPool, local_steps: int):
    def plain(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def train() -> list[torch.Tensor]:
        strategy = HorovodStrategy(local_steps=local_steps)
        return fitted(Net(plain, seed=1 + hvd.rank()), strategy)[0]

    found = ranks.run(train)
    assert all(map(torch.equal, *found))
    if local_steps == 1:  # averaging parameters is averaging gradients then
        assert_same(found, alone(Net(plain)))
