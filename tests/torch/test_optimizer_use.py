"""DistributedOptimizer used as any optimizer: closures, schedulers, checkpoints, scalers."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from tests.ranks import RankPool, run_ranks
from tests.torch.training import (
    OPTIMIZERS,
    assert_equal,
    batch_of,
    loss_of,
    make_model,
    my_rows,
    overlapping,
    train,
    weights_of,
)


def _closure() -> Any:
    alone, together = make_model("mlp"), make_model("mlp")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(together.parameters(), lr=0.1))
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        batch = batch_of(step, hvd.size())

        def evaluate(model: nn.Module, own: Any, x: torch.Tensor) -> torch.Tensor:
            own.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        mine = my_rows(batch)
        expected = loss_of(together, mine).item()
        losses.append(
            optimizer.step(lambda x=mine: evaluate(together, optimizer, x)).item() == expected
        )
        base.step(lambda x=batch: evaluate(alone, base, x))
    assert all(losses)
    return weights_of(together), weights_of(alone)


def test_closure(pool2: RankPool):
    assert_equal(pool2.run(_closure), rtol=1e-4, atol=1e-5)


def _scheduled(before: bool, load: bool) -> Any:
    alone, together = make_model("mlp"), make_model("mlp")
    plain = torch.optim.SGD(together.parameters(), lr=0.1, momentum=0.9)
    if before:
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, together.named_parameters())
    if not before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    base = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    base_scheduler = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            train(together, optimizer, 1, my_rows)
            train(alone, base, 1, lambda batch: batch)
            scheduler.step()
            base_scheduler.step()
            if load:
                optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == base.param_groups[0]["lr"] == 0.0125
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_learning_rate_scheduler(pool2: RankPool, before: bool, load: bool):
    assert_equal(pool2.run(_scheduled, before, load), rtol=1e-4, atol=1e-5)


def _restored(how: str, overlap: bool) -> Any:
    """Train, save, and go on with what was restored."""
    alone, together = make_model("mlp"), make_model("mlp")
    make = OPTIMIZERS["Adam"]
    calls = []
    with overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            make(together.parameters()), together.named_parameters(), backward_passes_per_step=2
        )
        optimizer.set_backward_passes_per_step(1)
        train(together, optimizer, 2, my_rows)
        if how == "state_dict":
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            buffer.seek(0)
            optimizer = hvd.DistributedOptimizer(
                make(together.parameters()), together.named_parameters()
            )
            optimizer.load_state_dict(torch.load(buffer, weights_only=True))
        elif how == "pickle":
            together, optimizer = pickle.loads(pickle.dumps((together, optimizer)))
        else:
            if hvd.rank() == 1:  # ranks need not copy equally often
                copy.deepcopy((together, optimizer))
            kept = together, optimizer
            together, optimizer = copy.deepcopy(kept)
            train(*kept, 1, my_rows)  # the original lives on
        assert type(optimizer).__name__ == "Adam"
        assert optimizer.process_set is hvd.global_process_set
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        train(together, optimizer, 2, my_rows)
    assert len(calls) == 2
    base = make(alone.parameters())
    train(alone, base, 2, lambda batch: batch)
    train(alone, base, 2, lambda batch: batch)
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_restored(pool2: RankPool, how: str, overlap: bool):
    assert_equal(pool2.run(_restored, how, overlap), rtol=1e-4, atol=1e-4)


def _clipped(how: str) -> Any:
    alone, together = make_model("mlp"), make_model("mlp")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(together.parameters(), lr=0.1))
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    caught: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        base.zero_grad()
        loss_of(together, my_rows(batch_of(step, hvd.size()))).backward()
        loss_of(alone, batch_of(step, hvd.size())).backward()
        optimizer.synchronize()
        for model in (together, alone):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if how == "skip":
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        caught.append([str(w.message) for w in seen])
        base.step()
    for messages in caught:
        assert len(messages) == (0 if how == "skip" else 1), messages
        words = (
            "optimizer.step() called without optimizer.skip_synchronize() context after "
            "optimizer.synchronize()"
        )
        assert how == "skip" or words in messages[0]
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("how", ["skip", "warn"])
def test_clipping(pool2: RankPool, how: str):
    assert_equal(pool2.run(_clipped, how), rtol=1e-4, atol=1e-5)


def _scaled(name: str, unscale: bool, op: str, overlap: bool) -> Any:
    """Rank 1 alone meets infinity in the second step: nobody makes it, and all go on."""
    model = make_model("mlp")
    with overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[name](model.parameters()), model.named_parameters(), op=getattr(hvd, op)
        )
        scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
        moved, scales = [], []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                optimizer.zero_grad()
                before = weights_of(model)
                loss = loss_of(model, my_rows(batch_of(step, hvd.size())))
                if step == 1 and hvd.rank() == 1:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                after = weights_of(model)
                moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
                scales.append(scaler.get_scale())
    assert moved == [True, False, True, True]
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    return weights_of(model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adam fused"])
def test_grad_scaler(pool2: RankPool, name: str, op: str, unscale: bool, overlap: bool):
    first, second = pool2.run(_scaled, name, unscale, op, overlap)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(weight.isfinite().all() for weight in first)


def _scaled_value() -> Any:
    alone, together = make_model("mlp"), make_model("mlp")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(together.parameters(), lr=0.1))
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(together, my_rows(batch_of(step, hvd.size())))).backward()
        scaler.step(optimizer)
        scaler.update()
    train(alone, base, 3, lambda batch: batch)
    return weights_of(together), weights_of(alone)


def test_grad_scaler_gives_the_same_weights(pool2: RankPool):
    assert_equal(pool2.run(_scaled_value), rtol=1e-4, atol=1e-5)


def _added_group() -> Any:
    alone, together = make_model("mlp"), make_model("mlp")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together[2].parameters(), lr=0.1), together[2].named_parameters()
    )
    base = torch.optim.SGD(alone[2].parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": together[0].parameters(), "lr": 0.01})
            base.add_param_group({"params": alone[0].parameters(), "lr": 0.01})
        together.zero_grad()
        alone.zero_grad()
        loss_of(together, my_rows(batch_of(step, hvd.size()))).backward()
        loss_of(alone, batch_of(step, hvd.size())).backward()
        optimizer.step()
        base.step()
    return weights_of(together), weights_of(alone)


def test_added_param_group(pool2: RankPool):
    assert_equal(pool2.run(_added_group), rtol=1e-4, atol=1e-5)


class _OldSGD(torch.optim.SGD):
    """Clears gradients as optimizers did before torch 1.7: without arguments, to zeros."""

    elementwise = True

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=False)


def _old_zero_grad(overlap_forward: bool) -> Any:
    alone, together = make_model("mlp"), make_model("mlp")
    optimizer = hvd.DistributedOptimizer(
        _OldSGD(together.parameters(), lr=0.1),
        together.named_parameters(),
        overlap_forward=together if overlap_forward else None,
    )
    train(together, optimizer, 3, my_rows)
    train(alone, _OldSGD(alone.parameters(), lr=0.1), 3, lambda batch: batch)
    weights = weights_of(together), weights_of(alone)
    optimizer.zero_grad()
    assert all(param.grad is not None and not param.grad.any() for param in together.parameters())
    optimizer._restart()  # as in an elastic job
    assert all(param.grad is None for param in together.parameters())
    return weights


@pytest.mark.parametrize("overlap_forward", [False, True])
def test_zero_grad_is_that_of_the_wrapped_optimizer(pool2: RankPool, overlap_forward: bool):
    assert_equal(pool2.run(_old_zero_grad, overlap_forward), rtol=1e-4, atol=1e-5)


def _to_bytes(rank: int, size: int) -> bytes:
    hvd.init()
    model = make_model("mlp")
    optimizer = hvd.DistributedOptimizer(torch.optim.Rprop(model.parameters(), lr=0.1))
    return pickle.dumps((model, optimizer))


def _from_bytes(rank: int, size: int, pickled: bytes) -> list[int]:
    hvd.init()
    model, optimizer = pickle.loads(pickled)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(0))
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, 1, my_rows)
    return calls


def test_step_hooks_of_what_another_process_pickled():
    """Torch installs them when the first optimizer of a class is made, which here none was."""
    (pickled,) = run_ranks(_to_bytes, 1)
    assert run_ranks(_from_bytes, 1, pickled) == [[0, 1]]


def _dropped(shard_state: bool) -> list[bool]:
    model = make_model("mlp")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), shard_state=shard_state
    )
    train(model, optimizer, 3, my_rows)
    left = [weakref.ref(param) for param in model.parameters()] + [weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    return [reference() is None for reference in left]


@pytest.mark.parametrize("shard_state", [False, True])
def test_nothing_keeps_a_model_that_was_dropped(pool2: RankPool, shard_state: bool):
    for freed in pool2.run(_dropped, shard_state):
        assert all(freed)
