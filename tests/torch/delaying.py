"""Models in training with and without overlap_forward, and how the outcomes are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd
from horovod.torch.optimizers.delayed_update import DelayedUpdates, Update
from horovod.torch.optimizers.pending import is_pending
from tests.torch.training import MODELS, OPTIMIZERS, batch_of, loss_of, my_rows, weights_of

NONE, EVERY_OTHER, ALL = slice(0), slice(1, None, 2), slice(None)
NETWORK = {"HOROVOD_CPU_OPERATIONS": "gloo"}  # TCP, as between hosts


class Attention(nn.Module):
    """The weight of `attend.out_proj` is used, and `attend.out_proj` never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.unsqueeze(-1))
        return self.attend(x, x, x, need_weights=False)[0]


class Parent(nn.Module):
    """Reads the weights of a child, and of one more in every third pass."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = F.linear(torch.tanh(self.one(x)), self.two.weight, self.two.bias)
        return x if self.passes % 3 else F.linear(x, self.three.weight)


class Keeps(nn.Module):
    """Has its weights in a list as well, where no module finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.weights = [layer.weight for layer in self.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.sin(x @ weight)
        return x


class Transformed(nn.Module):
    """Hands its weight to code in C++ that torch knows nothing of: it does not ask who has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(6, 6), nn.Parameter(torch.eye(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.func.vjp(lambda weight: torch.tanh(x @ weight), self.weight)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x.unsqueeze(-1))[0])


class Halves(nn.Module):
    """One part is frozen and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.unused = (nn.Linear(6, 6) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.frozen(torch.tanh(self.used(x))))


def _parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    nn.utils.parametrizations.weight_norm(model[0])
    return model


ALL_MODELS: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "attention": Attention,
    "parent": Parent,
    "keeps": Keeps,
    "recurrent": Recurrent,
    "transformed": Transformed,
    "halves": Halves,
    "parametrized": _parametrized,
    "wide": lambda: nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 20)),
}
ALL_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{name: make for name, make in OPTIMIZERS.items() if name != "LBFGS"},
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}
if hasattr(torch.optim, "Adafactor"):  # since torch 2.5
    ALL_OPTIMIZERS["Adafactor"] = lambda p: torch.optim.Adafactor(p)
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
}


class Run:
    """A model in training, with updates that are delayed or not."""

    def __init__(
        self,
        delay: bool,
        model: str = "mlp",
        optimizer: str = "SGD",
        scheduler: str = "none",
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = ALL_MODELS[model]()
        self.delay = delay
        options |= {"overlap_forward": self.model} if delay else {}
        plain = ALL_OPTIMIZERS[optimizer](_groups(self.model))
        self.optimizer = hvd.DistributedOptimizer(plain, self.model.named_parameters(), **options)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.delayed: list[int] = []  # parameters that each step has left for later
        self.number = 0

    def forward(self) -> torch.Tensor:
        self.number += 1
        return loss_of(self.model, my_rows(batch_of(self.number, hvd.size())))

    def step(self, passes: int = 1, zero: str = "before") -> None:
        if zero == "before":
            self.optimizer.zero_grad()
        for _ in range(passes):
            loss = self.forward()
            if zero == "between":
                self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        self.note()
        if self.scheduler is not None:
            self.scheduler.step()
        if zero == "after":
            self.optimizer.zero_grad()
        elif zero == "zeros":
            self.optimizer.zero_grad(set_to_none=False)
        elif zero == "model":
            self.model.zero_grad()

    def note(self) -> None:
        kept = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.delayed.append(sum(map(is_pending, kept)))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Every second parameter with another learning rate."""
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.02}]


@contextmanager
def small_buckets(arrived: slice = NONE, early: float = 0.0) -> Iterator[None]:
    """Several buckets of the models here, from the second step on.

    Of those that are not updated yet `arrived` are reduced whenever somebody looks: none, as on a
    very slow network, unless told otherwise. `early` is the part of them that begins before the
    step.
    """

    def num_hidden(sizes: list[int], hidden: float) -> int:
        return round(early * len(sizes))

    def reduced(updates: DelayedUpdates) -> list[Update]:
        found = list(dict.fromkeys(updates._updates.values()))[arrived]
        for update in found:
            for request in update.bucket.requests:
                while not request.done():
                    request.wait_beside(1.0)
        return found

    with (
        mock.patch("horovod.torch.gradients.reducer.TRIAL_STEPS", 1),
        mock.patch("horovod.torch.gradients.bucketing.network_bucket", return_value=100),
        mock.patch("horovod.torch.gradients.forward_schedule.num_hidden", num_hidden),
        mock.patch.object(DelayedUpdates, "_reduced", reduced),
    ):
        yield


def compare(
    change: Callable[[Run], Any],
    arrived: slice = NONE,
    early: float = 0.0,
    **options: Any,
) -> Any:
    """What `change` leaves with and without the option, for `assert_same`."""
    results = []
    with small_buckets(arrived, early):
        for delay in (True, False):
            run = Run(delay, **options)
            seen = change(run)
            results.append((weights_of(run.model), seen))
            if delay:
                assert (max(run.delayed) > 0) == (arrived != ALL), "delayed while it had to wait"
    return results


def assert_same(everyones: list[Any]) -> None:
    """All ranks have the same weights, and each has the same with and without the option."""
    for with_option, without in everyones:
        assert_equal(with_option[0], without[0])
        assert_equal(with_option[0], everyones[0][0][0])
        assert_equal(with_option[1], without[1])


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert one == other
