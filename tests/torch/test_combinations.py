"""Ways to train that PyTorch has today: on two ranks they come to what one process comes to.

More of them are elsewhere: fused and foreach optimizers, LBFGS and both kinds of checkpointing in
`test_optimizer.py`, more of scalers in `test_optimizer_use.py`, profilers in
`test_profiler.py`, `fully_shard` in `test_dtensors.py`, other libraries in
`tests/docs/test_combinations_page.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import horovod.torch as hvd
from tests.ranks import RankPool
from tests.torch.training import assert_equal, batch_of, loss_of, my_rows, train, weights_of

STEPS = 4
TENSORWISE = [name for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)]


def _matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


def _with_whole_matrices(name: str, shard: bool) -> Any:
    make = getattr(torch.optim, name)
    together, alone = _matrices(), _matrices()
    optimizer = hvd.DistributedOptimizer(
        make(together.parameters(), lr=0.02), together.named_parameters(), shard_state=shard
    )
    train(together, optimizer, STEPS, my_rows)
    train(alone, make(alone.parameters(), lr=0.02), STEPS, lambda batch: batch)
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("name", TENSORWISE)
def test_optimizers_of_whole_matrices(pool2: RankPool, name: str, shard: bool):
    # Muon orthogonalises in bfloat16, so that another order of a sum is seen in the third digit.
    assert_equal(pool2.run(_with_whole_matrices, name, shard), rtol=1e-2, atol=1e-3)


def _scaled(dtype: torch.dtype) -> Any:
    """Weights after training in mixed precision, with a step that meets infinity on one rank."""
    together, alone = _matrices(), _matrices()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters()
    )
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(STEPS):
        batch = batch_of(step, hvd.size())
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = loss_of(together, my_rows(batch))
        is_infinite = step == 1 and hvd.rank() == 1
        scaler.scale(loss * torch.inf if is_infinite else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            plain.zero_grad()
            with torch.autocast("cpu", dtype):
                loss_of(alone, batch).mul(256).backward()
            for param in alone.parameters():
                param.grad.div_(256)
            plain.step()
    assert scaler.get_scale() == 128.0
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scalers_in_mixed_precision(pool2: RankPool, dtype: torch.dtype):
    assert_equal(pool2.run(_scaled, dtype), rtol=1e-2, atol=2e-3)


# -- torch.func: each fills the gradients of a model ---------------------------------------------


def _by_functional_call(model: nn.Module, rows: torch.Tensor) -> None:
    """backward() through a call of the model with parameters that are handed to it."""
    output = functional_call(model, dict(model.named_parameters()), rows)
    (output - 1).square().mean().backward()


def _by_grad(model: nn.Module, rows: torch.Tensor) -> None:
    """Gradients that a function returns: no hook of ours sees them arrive."""

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return (functional_call(model, parameters, rows) - 1).square().mean()

    found = grad(loss)({name: param.detach() for name, param in model.named_parameters()})
    for name, param in model.named_parameters():
        param.grad = found[name]


def _by_vmap(model: nn.Module, rows: torch.Tensor) -> None:
    """Gradients of each row."""

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return (functional_call(model, parameters, row) - 1).square().mean()

    parameters = {name: param.detach() for name, param in model.named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, rows)
    for name, param in model.named_parameters():
        param.grad = found[name].mean(dim=0)


WAYS: list[Callable[[nn.Module, torch.Tensor], None]] = [_by_functional_call, _by_grad, _by_vmap]


def _functional(way: Callable[[nn.Module, torch.Tensor], None]) -> Any:
    together, alone = _matrices(), _matrices()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(together.parameters(), lr=0.01), together.named_parameters()
    )
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step in range(STEPS):
        batch = batch_of(step, hvd.size())
        optimizer.zero_grad()
        way(together, my_rows(batch))
        optimizer.step()
        plain.zero_grad()
        loss_of(alone, batch).backward()
        plain.step()
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_torch_func(pool2: RankPool, way: Callable[..., None]):
    assert_equal(pool2.run(_functional, way), rtol=1e-3, atol=1e-4)
