"""What programs do wrong, or differently on one rank, while buckets are reduced beside backward.

Each case runs on all ranks of a job and leaves it usable. Run by test_overlapped_buckets, and as a
program by mpirun.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import horovod.torch as hvd

ODD = 1  # the rank that does something else
LAYERS = 4
WARM_UP = 2  # steps in which buckets are agreed
LR = 0.1


class Layers(nn.Module):
    """Layers that are used in a given order, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, order: Sequence[int] = range(LAYERS)) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int, order: Sequence[int]) -> torch.Tensor:
    return (model(batch(step, rank), order) - 0.5).square().sum()


@contextmanager
def one_bucket_each() -> Iterator[None]:
    """Every parameter has a bucket of its own, after the first step at the latest."""
    with (
        mock.patch("horovod.torch.gradients.bucketing.first_bucket", return_value=1),
        mock.patch("horovod.torch.gradients.bucketing.network_bucket", return_value=1),
        mock.patch("horovod.torch.gradients.bucketing.pays_beside_backward", return_value=True),
        mock.patch("horovod.torch.gradients.reducer.TRIAL_STEPS", 1),
    ):
        yield


class Training:
    """A model of all ranks, and beside it what it must become, computed here alone."""

    def __init__(self) -> None:
        self.model = Layers()
        self.alone = copy.deepcopy(self.model)
        sgd = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.optimizer: Any = hvd.DistributedOptimizer(sgd, self.model.named_parameters())
        self.number = 0
        for _ in range(WARM_UP):
            self.step()
        reducer = self.optimizer._reducer
        assert reducer._overlap
        assert len(reducer._buckets) == 2 * LAYERS

    def backward(self, order: Sequence[int] = range(LAYERS)) -> None:
        loss_of(self.model, self.number, hvd.rank(), order).backward()

    def step(self, orders: Sequence[Sequence[int] | None] | None = None) -> None:
        """`orders`: of the layers on each rank; None for one that is not there."""
        orders = orders or [range(LAYERS)] * hvd.size()
        mine = orders[hvd.rank()]
        if mine is not None:
            self.backward(mine)
            self.finish()
        self.expect(orders)

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def expect(self, orders: Sequence[Sequence[int] | None] | None = None) -> None:
        """Take the same step alone."""
        for rank, order in enumerate(orders or [range(LAYERS)] * hvd.size()):
            if order is not None:
                (loss_of(self.alone, self.number, rank, order) / hvd.size()).backward()
        with torch.no_grad():
            for param in self.alone.parameters():
                if param.grad is not None:
                    param -= LR * param.grad
                param.grad = None
        self.number += 1

    def check(self) -> None:
        for (name, mine), expected in zip(
            self.model.named_parameters(), self.alone.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, expected, msg=lambda text, n=name: f"{n}: {text}")


def skipped_parameters() -> None:
    """A parameter that is unused on one rank counts as zeros there, in whatever step."""
    training = Training()
    for unused in ([], [0], [3], [1, 2], [0, 1, 2, 3]):
        used = [layer for layer in range(LAYERS) if layer not in unused]
        orders: list[Sequence[int]] = [range(LAYERS)] * hvd.size()
        orders[ODD] = used
        if used:
            training.step(orders)
        else:  # a rank without any gradient
            if hvd.rank() != ODD:
                training.backward()
            training.finish()
            training.expect([None if rank == ODD else r for rank, r in enumerate(orders)])
    training.step()
    training.check()


def other_order() -> None:
    """Gradients that arrive in another order on one rank."""
    training = Training()
    for order in ([3, 1, 0, 2], [2, 3, 1, 0], range(LAYERS)):
        orders: list[Sequence[int]] = [range(LAYERS)] * hvd.size()
        orders[ODD] = order
        training.step(orders)
    training.check()


def early_zero_grad() -> None:
    """Refused while gradients are being reduced, whoever does it; nothing is lost."""
    training = Training()
    for everybody in (True, False):
        training.backward()
        if everybody or hvd.rank() == ODD:
            with pytest.raises(AssertionError, match="zero_grad"):
                training.optimizer.zero_grad()
        training.finish()
        training.expect()
    training.check()


def early_join() -> None:
    """Ranks have different numbers of batches; who has joined counts as zeros."""
    training = Training()
    for step in range(hvd.size()):
        present = [None if rank < step else range(LAYERS) for rank in range(hvd.size())]
        training.step(present)
        if hvd.rank() == step:
            hvd.join()
    weights = torch.cat([p.detach().view(-1) for p in training.model.parameters()])
    # Who joined early missed the updates after that; all others have them.
    last = hvd.broadcast(weights, hvd.size() - 1, name="weights of the last")
    expected = torch.cat([p.detach().view(-1) for p in training.alone.parameters()])
    torch.testing.assert_close(last, expected)


def different_models() -> None:
    """Refused before the first step, on every rank, naming ranks and parameter."""
    model = Layers()
    if hvd.rank() == ODD:
        model.layers[2] = nn.Linear(5, 7)
    with pytest.raises(ValueError) as caught:
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters()
        )
    for expected in ("ranks 0 and 1", "layers.2.weight", "[5, 5]", "[7, 5]"):
        assert expected in str(caught.value)


CHANGES = {
    "in place": lambda p: p.grad.mul_(2),
    "clipped": lambda p: nn.utils.clip_grad_norm_([p], 1e-3),
    "replaced": lambda p: setattr(p, "grad", torch.ones_like(p)),
    "taken away": lambda p: setattr(p, "grad", None),
}


def changed_gradients() -> None:
    """An error that names the parameter, on the rank that did it; the others go on."""
    for change in CHANGES.values():
        training = Training()
        training.backward()
        param = training.model.layers[2].weight
        if hvd.rank() == ODD:
            change(param)
            with pytest.raises(RuntimeError, match=r"'layers\.2\.weight' was changed"):
                training.optimizer.step()
            training.optimizer.zero_grad()
        else:
            training.finish()
        hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
        training.alone.load_state_dict(training.model.state_dict())
        training.number += 1
        training.step()
        training.check()


def second_backward() -> None:
    """Refused where it happens; what it spoilt is not used."""
    training = Training()
    training.backward()
    if hvd.rank() == ODD:
        with pytest.raises(AssertionError, match=r"'layers\..*backward_passes_per_step"):
            training.backward()
        with pytest.raises(RuntimeError, match=r"'layers\..*was changed"):
            training.optimizer.step()
        training.optimizer.zero_grad()
    else:
        training.finish()
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    training.alone.load_state_dict(training.model.state_dict())
    training.number += 1
    training.step()
    training.check()


CASES = {
    case.__name__: case
    for case in (
        skipped_parameters,
        other_order,
        early_zero_grad,
        early_join,
        different_models,
        changed_gradients,
        second_backward,
    )
}


def run(name: str) -> float:
    """The case, and then something ordinary: the job goes on."""
    with one_bucket_each():
        CASES[name]()
    return float(hvd.allreduce(torch.ones(3), op=hvd.Sum, name="afterwards")[0])


if __name__ == "__main__":
    hvd.init()
    try:
        for chosen in CASES:
            assert run(chosen) == hvd.size()
    except BaseException as error:
        print(f"rank {hvd.rank()}: {type(error).__name__}: {error}", flush=True)
        os._exit(1)  # mpirun ends the others
    print(f"rank {hvd.rank()}: {len(CASES)} cases are right", flush=True)
    hvd.shutdown()
    sys.exit()
