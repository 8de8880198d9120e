"""DistributedOptimizer with op=Adasum."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from tests.ranks import RankPool
from tests.torch.training import (
    assert_equal,
    batch_of,
    loss_of,
    make_model,
    my_rows,
    train,
    weights_of,
)


def _adasum(kind: str, restore: str) -> Any:
    """One step with SGD is the Adasum of the ranks' own steps."""
    model, own = make_model(kind), make_model(kind)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Adasum
    )
    if restore == "pickle":
        model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    elif restore == "deepcopy":
        model, optimizer = copy.deepcopy((model, optimizer))
    before = weights_of(own)
    train(own, torch.optim.SGD(own.parameters(), lr=0.1), 1, my_rows)
    expected = [
        start + hvd.allreduce((end - start).contiguous(), op=hvd.Adasum)
        for start, end in zip(before, weights_of(own), strict=True)
    ]
    batch = my_rows(batch_of(0, hvd.size()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    loss = loss_of(model, batch).item()
    assert optimizer.step(closure).item() == loss
    optimizer.synchronize()
    with pytest.raises(AssertionError), optimizer.skip_synchronize():
        pass
    with optimizer.no_sync():
        loss_of(model, batch).backward()
    return weights_of(model), expected


@pytest.mark.parametrize("restore", ["", "pickle", "deepcopy"])
@pytest.mark.parametrize("kind", ["mlp", "conv", "mixed"])
def test_adasum(pool2: RankPool, kind: str, restore: str):
    wide = {"rtol": 1e-2, "atol": 1e-2} if kind == "mixed" else {"rtol": 1e-4, "atol": 1e-6}
    assert_equal(pool2.run(_adasum, kind, restore), **wide)


def _guarded() -> Any:
    """The same guards as with every other operator, though nothing is in flight."""
    model = make_model("mlp")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        backward_passes_per_step=2,
        op=hvd.Adasum,
    )
    batch = my_rows(batch_of(0, hvd.size()))
    for _ in range(2):
        for _ in range(2):
            loss_of(model, batch).backward()
        with pytest.raises(AssertionError, match="raise backward_passes_per_step"):
            loss_of(model, batch).backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="add_param_group"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):
        loss_of(model, batch).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    return weights_of(model)


def test_guards(pool2: RankPool):
    first, second = pool2.run(_guarded)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _added_group() -> Any:
    """A group that comes later is combined as if it had been there from the start."""
    results = []
    for later in (True, False):
        model: Any = make_model("mlp")
        last, first = model[2].named_parameters(prefix="last"), model[0].parameters()
        params = [{"params": model[2].parameters()}]
        if not later:
            params.append({"params": model[0].parameters(), "lr": 0.01})
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params, lr=0.1, momentum=0.9), last if later else None, op=hvd.Adasum
        )
        if later:
            optimizer.add_param_group({"params": first, "lr": 0.01})
        train(model, optimizer, 3, my_rows)
        results.append(weights_of(model))
    return tuple(results)


def test_added_param_group(pool2: RankPool):
    assert_equal(pool2.run(_added_group), rtol=0, atol=0)
