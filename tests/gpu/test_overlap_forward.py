"""DistributedOptimizer(overlap_forward=model) on devices: the parameters of an ordinary step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import horovod.torch as hvd
from horovod.torch.optimizers.pending import with_aliases
from tests.gpu import JOBS, size_of
from tests.gpu.pools import GpuPools, few_examples
from tests.gpu.training import TIGHT, precise, weights_of
from tests.torch.delaying import ALL_MODELS, ALL_OPTIMIZERS, SCHEDULERS
from tests.torch.training import batch_of, loss_of, my_rows

Tensor = torch.Tensor

# The library's kernels of recurrent and attention layers need not give the same bits twice.
KINDS = sorted(set(ALL_MODELS) - {"recurrent", "attention"})
STEPS = 14  # in host memory, updates are delayed after the tenth

Look = Callable[[nn.Module, Any, torch.device], Any]


def evaluated(model: nn.Module, optimizer: Any, device: torch.device) -> Tensor:
    model.eval()
    with torch.no_grad():
        result = model(batch_of(99, 1).to(device))
    model.train()
    return result


LOOKS: dict[str, Look] = {
    "nothing": lambda model, optimizer, device: None,
    "eval": evaluated,
    "state_dict": lambda model, optimizer, device: copy.deepcopy(model.state_dict()),
    "optimizer state": lambda model, optimizer, device: copy.deepcopy(
        optimizer.state_dict()["state"]
    ),
    "gradients": lambda model, optimizer, device: [
        None if p.grad is None else p.grad.clone() for p in model.parameters()
    ],
    "a copy": lambda model, optimizer, device: weights_of(copy.deepcopy(model)),
    "a norm": lambda model, optimizer, device: torch.stack(
        [param.norm().float() for param in model.parameters()]
    ).detach(),
    "broadcast": lambda model, optimizer, device: hvd.broadcast_parameters(
        model.state_dict(), root_rank=0
    ),
}


def in_host_memory(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.detach().cpu()
    if isinstance(found, dict):
        return {key: in_host_memory(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [in_host_memory(value) for value in found]
    return found


def trained(delay: bool, how: dict[str, str]) -> tuple[list[Tensor], list[Any]]:
    device = precise()
    torch.manual_seed(0)
    model = ALL_MODELS[how["model"]]().to(device)
    options = {"overlap_forward": model} if delay else {}
    optimizer = hvd.DistributedOptimizer(
        ALL_OPTIMIZERS[how["optimizer"]](model.parameters()), model.named_parameters(), **options
    )
    scheduler = SCHEDULERS[how["scheduler"]](optimizer)
    seen = []
    for step in range(STEPS):
        if how["zero"] == "before":
            optimizer.zero_grad()
        loss_of(model, my_rows(batch_of(step, hvd.size())).to(device)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if step % 5 == 3 or step == STEPS - 1:
            seen.append(in_host_memory(LOOKS[how["look"]](model, optimizer, device)))
        if how["zero"] == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif how["zero"] == "after":
            optimizer.zero_grad()
    return weights_of(model), seen


def both(how: dict[str, str]) -> list[Any]:
    return [trained(delay, how) for delay in (True, False)]


def assert_equal(one: Any, other: Any, exact: bool) -> None:
    """Bit for bit, unless more than two numbers are added up, perhaps in another order."""
    if isinstance(one, Tensor):
        if exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, **TIGHT)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key], exact)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs, exact)
    else:
        assert one == other


def check(gpus: GpuPools, job: str, how: dict[str, str]) -> None:
    results = gpus.run(job, both, how)
    for with_option, without in results:
        assert_equal(with_option, without, exact=size_of(job) == 2)
        assert_equal(with_option[0], results[0][0][0], exact=True)


@pytest.mark.parametrize("job", JOBS)
@few_examples
@given(
    model=st.sampled_from(KINDS),
    optimizer=st.sampled_from(sorted(ALL_OPTIMIZERS)),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    zero=st.sampled_from(["before", "after", "zeros"]),
    look=st.sampled_from(sorted(LOOKS)),
)
def test_same_as_without(gpus: GpuPools, job: str, **how: str):
    check(gpus, job, how)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("job", ["2 ranks", "2 hosts"])
def test_nobody_sees_a_stale_parameter(gpus: GpuPools, job: str, look: str):
    how = {"model": "wide", "optimizer": "Adam", "scheduler": "none", "zero": "before"}
    check(gpus, job, {**how, "look": look})


def trained_while_busy() -> tuple[list[Tensor], list[Tensor]]:
    """Large layers whose reduction outlasts backward: forward must wait for each, on the device."""
    results = []
    for delay in (True, False):
        device = precise()
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).to(device)
        options = {"overlap_forward": model} if delay else {}
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            model.named_parameters(),
            **options,
        )
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 512, generator=generator).to(device)).square().mean().backward()
            optimizer.step()
        results.append(weights_of(model))
    return results[0], results[1]


@pytest.mark.parametrize("job", JOBS)
def test_large_layers(gpus: GpuPools, job: str):
    results = gpus.run(job, trained_while_busy)
    for mine, without in results:
        assert_equal(mine, without, exact=size_of(job) == 2)
        assert_equal(mine, results[0][0], exact=True)


def shared_after_steps() -> dict[str, int]:
    """How many parameters of each model other tensors share the memory of, after ordinary steps."""
    found = {}
    for name, make in ALL_MODELS.items():
        device = precise()
        model = make().to(device)
        optimizer = torch.optim.Adam(model.parameters())
        for number in range(3):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=number > 0):
                loss = loss_of(model, batch_of(number, 1).to(device))
            loss.backward()
            optimizer.step()
        found[name] = len(with_aliases(list(model.parameters())))
    return found


def test_steps_leave_no_tensor_that_shares_the_memory_of_a_parameter(gpus: GpuPools):
    """Otherwise updates would be made in `step()`, and the next forward would hide nothing."""
    assert set(gpus.run("2 ranks", shared_after_steps)[0].values()) == {0}
