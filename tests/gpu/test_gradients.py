"""What programs do with gradients that are views of a bucket's memory, and are reduced there.

Gradients are kept or replaced, missing on some ranks, laid out in other ways, of several dtypes,
and changed when they must not be.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import horovod.torch as hvd
from tests.accelerators import on_cpu
from tests.gpu import JOBS, size_of
from tests.gpu.pools import GpuPools, few_examples
from tests.gpu.training import TIGHT, WIDE, Twins, assert_alike, precise, sgd, weights_of
from tests.torch.training import batch_of, loss_of, make_model, my_rows

Tensor = torch.Tensor

ODD = 1  # the rank that does something else


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


# -- how gradients are reset --------------------------------------------------------------------


def reset(how: str, model: str) -> Any:
    twins = Twins(model, plain_sgd)
    for number in range(6):
        if how == "None":
            twins.zero_grad()
        elif how == "zeros":
            twins.zero_grad(set_to_none=False)
        elif how == "in turns":
            twins.zero_grad(set_to_none=number % 2 == 0)
        elif how == "by the model":
            twins.together.zero_grad()
            twins.alone.zero_grad()
        elif how == "by hand":
            for net in (twins.together, twins.alone):
                for param in net.parameters():
                    param.grad = None
        # "never": reduced gradients and new ones add up, as one process's do.
        twins.backward(number)
        twins.step()
    return twins.results()


@pytest.mark.parametrize("how", ["None", "zeros", "in turns", "by the model", "by hand", "never"])
@pytest.mark.parametrize("job", JOBS)
def test_every_way_to_reset(gpus: GpuPools, job: str, how: str):
    assert_alike(gpus.run(job, reset, how, "mlp"), rtol=1e-3, atol=1e-4)


def looked_at() -> Any:
    """Gradients that a script reads after the step are the reduced ones, and stay."""
    twins = Twins("mlp", plain_sgd)
    seen = []
    for number in range(4):
        twins.zero_grad(set_to_none=number % 2 == 0)
        twins.backward(number)
        twins.step()
        mine = [param.grad.detach().cpu().clone() for param in twins.together.parameters()]
        alone = [param.grad.detach().cpu().clone() for param in twins.alone.parameters()]
        seen.append((mine, alone))
    return [each for mine, _ in seen for each in mine], [each for _, own in seen for each in own]


@pytest.mark.parametrize("job", JOBS)
def test_gradients_after_a_step_are_the_reduced_ones(gpus: GpuPools, job: str):
    assert_alike(gpus.run(job, looked_at), rtol=1e-3, atol=1e-5)


def assigned(by_turns: bool) -> Any:
    """A script that computes gradients itself and assigns them, in some steps or in all."""
    twins = Twins("mlp", plain_sgd)
    for number in range(6):
        twins.zero_grad(set_to_none=number % 3 != 0)
        if by_turns and number % 2 == 0:
            twins.backward(number)
        else:
            params = list(twins.together.parameters())
            found = torch.autograd.grad(loss_of(twins.together, twins.rows(number)), params)
            for param, gradient in zip(params, found, strict=True):
                param.grad = gradient
            twins.base.zero_grad()
            loss_of(twins.alone, twins.batch(number)).backward()
        twins.step()
    return twins.results()


@pytest.mark.parametrize("by_turns", [False, True])
@pytest.mark.parametrize("job", JOBS)
def test_a_script_that_assigns_gradients(gpus: GpuPools, job: str, by_turns: bool):
    assert_alike(gpus.run(job, assigned, by_turns), rtol=1e-3, atol=1e-4)


# -- which gradients there are ------------------------------------------------------------------


class Layers(nn.Module):
    """Layers of which a pass uses some, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x


def used(steps: list[list[list[int]]], zeros: bool) -> Any:
    """In each step every rank uses layers of its own; what it does not use counts as zeros."""
    twins = Twins(Layers, plain_sgd)
    size = hvd.size()
    for number, orders in enumerate(steps):
        twins.zero_grad(set_to_none=not zeros)
        for rank, order in enumerate(orders):
            if order:
                rows = twins.rows(number, rank)
                (twins.alone(rows, order).square().sum() / size).backward()
        mine = orders[hvd.rank()]
        if mine:
            twins.together(twins.rows(number), mine).square().sum().backward()
        twins.step()
    return twins.results()


def orders(size: int) -> st.SearchStrategy[list[list[int]]]:
    """Most ranks use all layers in order, some not."""
    usual = st.just([0, 1, 2, 3])
    other = st.lists(st.integers(0, 3), unique=True)
    return st.lists(usual | other, min_size=size, max_size=size)


@pytest.mark.parametrize("job", JOBS)
@few_examples
@given(data=st.data(), zeros=st.booleans())
def test_ranks_use_different_parameters(gpus: GpuPools, job: str, data: st.DataObject, zeros: bool):
    size = size_of(job)
    # Somebody uses each layer in the first step: one process has no zeros of what nobody has used.
    first = [[[0, 1, 2, 3]] * size]
    steps = first + data.draw(st.lists(orders(size), min_size=1, max_size=5))
    assert_alike(gpus.run(job, used, steps, zeros), rtol=1e-3, atol=1e-4)


def thawed(frozen_first: bool) -> Any:
    twins = Twins("mlp", plain_sgd)
    models: list[Any] = [twins.together, twins.alone]
    number = 0
    for frozen in (frozen_first, not frozen_first, frozen_first, not frozen_first):
        for model in models:
            model[0].requires_grad_(not frozen)
        before = weights_of(models[0][0])
        for _ in range(2):
            twins.train([number])
            number += 1
        same = [torch.equal(a, b) for a, b in zip(before, weights_of(models[0][0]), strict=True)]
        assert all(same) if frozen else not any(same)
    return twins.results()


@pytest.mark.parametrize("frozen_first", [False, True])
@pytest.mark.parametrize("job", JOBS)
def test_a_layer_that_is_frozen_and_thawed(gpus: GpuPools, job: str, frozen_first: bool):
    assert_alike(gpus.run(job, thawed, frozen_first), rtol=1e-3, atol=1e-4)


# -- what they look like ------------------------------------------------------------------------


class Images(nn.Module):
    """Convolutions with channels last, and a layer between them in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.middle = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.last = nn.Conv2d(8, 4, (1, 3), padding=(0, 1))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(-1, 3, 1, 2)).permute(0, 2, 3, 1)
        x = self.middle(x.bfloat16()).float().permute(0, 3, 1, 2)
        return self.last(x)


def strides(tensor: Tensor) -> list[int]:
    """Of the dimensions that have any."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def laid_out(zeros: bool) -> Any:
    twins = Twins(Images, plain_sgd)
    for number in range(5):
        twins.zero_grad(set_to_none=not zeros)
        twins.backward(number)
        twins.step()
        for param in twins.together.parameters():
            assert param.grad.dtype is param.dtype
            assert strides(param.grad) == strides(param), "as backward alone lays it out"
    return twins.results()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("job", JOBS)
def test_channels_last_and_mixed_dtypes(gpus: GpuPools, job: str, zeros: bool):
    assert_alike(gpus.run(job, laid_out, zeros), **WIDE)


def strange_layouts() -> Any:
    """Gradients that the script sets, laid out differently on each rank."""
    device = precise()
    parameter = torch.zeros(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    strided = torch.zeros(4, 6, device=device)[:, ::2]
    params = [nn.Parameter(parameter), nn.Parameter(strided)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    values = torch.arange(120.0, device=device).view(2, 3, 4, 5)
    slices = torch.arange(12.0, device=device).view(4, 3)
    for _ in range(2):
        optimizer.zero_grad()
        if hvd.rank() == ODD:
            params[0].grad = values.clone(memory_format=torch.channels_last)
            params[1].grad = slices.t().contiguous().t()
        else:
            params[0].grad, params[1].grad = values.clone(), slices.clone()
        optimizer.step()
    expected = [-2 * values.cpu(), -2 * slices.cpu()]
    return [each.detach().cpu() for each in params], expected


@pytest.mark.parametrize("job", JOBS)
def test_layouts_that_differ_between_ranks(gpus: GpuPools, job: str):
    assert_alike(gpus.run(job, strange_layouts), rtol=0, atol=0)


# -- when they are changed ----------------------------------------------------------------------


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda param: param.grad.mul_(2),
    "clipped": lambda param: nn.utils.clip_grad_norm_([param], 1e-3),
    "replaced": lambda param: setattr(param, "grad", torch.ones_like(param)),
    "taken away": lambda param: setattr(param, "grad", None),
}


def changed(how: str) -> tuple[str, Any]:
    """One rank changes a gradient that is being reduced; after the error all go on."""
    twins = Twins(Layers, plain_sgd)
    everything = [0, 1, 2, 3]

    def backward(number: int) -> None:
        twins.together(twins.rows(number), everything).square().sum().backward()

    for number in range(3):  # in the first ones buckets are agreed
        twins.optimizer.zero_grad()
        backward(number)
        twins.optimizer.step()
    twins.optimizer.zero_grad()
    backward(3)
    said = ""
    if hvd.rank() == ODD:
        CHANGES[how](twins.together.layers[2].weight)
        with pytest.raises(RuntimeError) as caught:
            twins.optimizer.step()
        said = str(caught.value)
    else:
        twins.optimizer.step()
    twins.optimizer.zero_grad()
    hvd.broadcast_parameters(twins.together.state_dict(), root_rank=0)
    twins.alone.load_state_dict(twins.together.state_dict())
    for number in range(4, 6):
        twins.zero_grad()
        backward(number)
        for rank in range(hvd.size()):
            rows = twins.rows(number, rank)
            (twins.alone(rows, everything).square().sum() / hvd.size()).backward()
        twins.step()
    return said, twins.results()


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("job", JOBS)
def test_a_change_while_it_is_reduced_is_refused(gpus: GpuPools, job: str, how: str):
    if on_cpu() and job == "2 hosts":
        pytest.skip("in host memory, the first steps between hosts measure the network")
    results = gpus.run(job, changed, how)
    assert "layers.2.weight" in results[ODD][0]
    assert "synchronize()" in results[ODD][0], "what to do"
    assert_alike([after for _, after in results], rtol=1e-3, atol=1e-4)


def clipped(explicitly: bool) -> tuple[list[str], Any]:
    """What `synchronize` has reduced may be changed."""
    twins = Twins("mlp", sgd)
    said = []
    for number in range(4):
        twins.zero_grad()
        twins.backward(number)
        twins.optimizer.synchronize()
        for model in (twins.together, twins.alone):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if explicitly:
                with twins.optimizer.skip_synchronize():
                    twins.optimizer.step()
            else:
                twins.optimizer.step()
        said += [str(warning.message) for warning in seen]
        twins.base.step()
    return said, twins.results()


@pytest.mark.parametrize("explicitly", [True, False])
@pytest.mark.parametrize("job", JOBS)
def test_clipping_after_synchronize(gpus: GpuPools, job: str, explicitly: bool):
    results = gpus.run(job, clipped, explicitly)
    for said, _ in results:
        assert len(said) == (0 if explicitly else 4)
        assert all("skip_synchronize" in each for each in said)
    assert_alike([after for _, after in results], **TIGHT)


def reset_too_early() -> Any:
    """`zero_grad` while gradients are being reduced is refused, and nothing is lost."""
    twins = Twins("mlp", plain_sgd)
    twins.train([0, 1])
    for number in (2, 3):
        twins.zero_grad()
        twins.backward(number)
        if number == 2 or hvd.rank() == ODD:
            with pytest.raises(AssertionError, match="zero_grad"):
                twins.optimizer.zero_grad()
        twins.step()
    return twins.results()


@pytest.mark.parametrize("job", JOBS)
def test_a_reset_that_comes_too_early(gpus: GpuPools, job: str):
    assert_alike(gpus.run(job, reset_too_early), rtol=1e-3, atol=1e-4)


def added_group() -> Any:
    """Parameters that come to the optimizer later."""
    device = precise()
    models: list[Any] = [make_model("mlp").to(device) for _ in range(2)]
    optimizers: list[Any] = [plain_sgd(model[2].parameters()) for model in models]
    named = models[0][2].named_parameters(prefix="2")
    optimizers[0] = hvd.DistributedOptimizer(optimizers[0], named)
    for number in range(5):
        batch = batch_of(number, hvd.size()).to(device)
        for model, optimizer, rows in zip(models, optimizers, (my_rows(batch), batch), strict=True):
            if number == 2:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            model.zero_grad()
            loss_of(model, rows).backward()
            optimizer.step()
    return weights_of(models[0]), weights_of(models[1])


@pytest.mark.parametrize("job", JOBS)
def test_parameters_that_come_later(gpus: GpuPools, job: str):
    assert_alike(gpus.run(job, added_group), rtol=1e-3, atol=1e-4)
