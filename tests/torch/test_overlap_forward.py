"""DistributedOptimizer(overlap_forward=model): the parameters of an ordinary step, made later."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd
from horovod.torch.pending import is_pending
from tests.ranks import RankPool
from tests.torch.training import MODELS, OPTIMIZERS, batch_of, loss_of, my_rows, weights_of

NETWORK = {"HOROVOD_CPU_OPERATIONS": "gloo"}  # TCP, as between hosts


@pytest.fixture(scope="module")
def network2() -> Iterator[RankPool]:
    pool = RankPool(2, NETWORK)
    yield pool
    pool.close()


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
    "halves": Halves,
    "parametrized": _parametrized,
}
ALL_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{name: make for name, make in OPTIMIZERS.items() if name != "LBFGS"},
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}
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


def small_buckets() -> Any:
    """Several buckets of the models here, from the second step on."""
    return mock.patch.multiple(
        "horovod.torch.gradients", TRIAL_STEPS=1, network_bucket=lambda *_: 100
    )


def compare(change: Callable[[Run], Any], **options: Any) -> Any:
    """What `change` leaves with and without the option, for `assert_same`."""
    results = []
    with small_buckets():
        for delay in (True, False):
            run = Run(delay, **options)
            seen = change(run)
            results.append((weights_of(run.model), seen))
            if delay:
                assert max(run.delayed) > 0, "no update was delayed"
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


# -- the same parameters --------------------------------------------------------------------


def _trained(steps: int, passes: int, zero: str, options: dict[str, Any]) -> Any:
    def train(run: Run) -> Any:
        for _ in range(steps):
            run.step(passes, zero)
        return run.optimizer.state_dict()["state"]

    return compare(train, **options, backward_passes_per_step=passes)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    model=st.sampled_from(sorted(ALL_MODELS)),
    optimizer=st.sampled_from(sorted(ALL_OPTIMIZERS)),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    steps=st.integers(4, 7),
    passes=st.integers(1, 2),
    zero=st.sampled_from(["before", "after", "between", "zeros", "model", "never"]),
)
def test_same_as_without(network2: RankPool, steps: int, passes: int, zero: str, **options: str):
    passes = 1 if zero == "between" else passes
    assert_same(network2.run(_trained, steps, passes, zero, options))


@pytest.mark.parametrize("model", ALL_MODELS)
def test_models(network2: RankPool, model: str):
    assert_same(network2.run(_trained, 6, 1, "before", {"model": model}))


@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_optimizers(network2: RankPool, optimizer: str):
    options = {"optimizer": optimizer, "scheduler": "step"}
    assert_same(network2.run(_trained, 6, 1, "before", options))


def _compressed() -> Any:
    return compare(lambda run: [run.step() for _ in range(5)], compression=hvd.Compression.bf16)


def test_compression(network2: RankPool):
    assert_same(network2.run(_compressed))


# -- what must see finished parameters ------------------------------------------------------


def _weights_by(look: Callable[[Run], Any]) -> Callable[[Run], Any]:
    """Steps after each of which somebody looks."""

    def change(run: Run) -> list[Any]:
        seen = []
        for _ in range(5):
            run.step()
            seen.append(look(run))
        return seen

    return change


def _evaluated(run: Run) -> torch.Tensor:
    run.model.eval()
    with torch.no_grad():
        result = run.model(batch_of(99, 1))
    run.model.train()
    return result


def _inferred(run: Run) -> torch.Tensor:
    with torch.inference_mode():
        return run.model(batch_of(99, 1)).clone()


def _autocast(run: Run) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return run.model(batch_of(99, 1)).detach()


def _kept(run: Run) -> list[torch.Tensor]:
    """As an average over steps of parameters that were listed at the start."""
    kept = run.__dict__.setdefault(
        "kept", [p for g in run.optimizer.param_groups for p in g["params"]]
    )
    return torch._foreach_mul([p.detach() for p in kept], 0.5)


def _unpickled(run: Run) -> Any:
    model, optimizer = pickle.loads(pickle.dumps((run.model, run.optimizer)))
    return weights_of(model), optimizer.state_dict()["state"]


LOOKS: dict[str, Callable[[Run], Any]] = {
    "eval": _evaluated,
    "inference": _inferred,
    "autocast": _autocast,
    "a layer alone": lambda run: run.model[2](torch.ones(1, 8)).detach(),
    "state_dict": lambda run: copy.deepcopy(run.model.state_dict()),
    "optimizer state_dict": lambda run: copy.deepcopy(run.optimizer.state_dict()),
    "optimizer state": lambda run: [dict(run.optimizer.state[p]) for p in run.model.parameters()],
    "kept list": _kept,
    "an attribute": lambda run: run.model[0].weight.detach().clone(),
    "data": lambda run: run.model[0].weight.data.clone(),
    "numpy": lambda run: run.model[0].bias.detach().numpy().tolist(),
    "print": lambda run: repr(run.model[0].bias),
    "gradients": lambda run: [p.grad.clone() for p in run.model.parameters()],
    "one gradient": lambda run: run.model[2].bias.grad.clone(),
    "deepcopy": lambda run: weights_of(copy.deepcopy(run.model)),
    "deepcopy of a parameter": lambda run: copy.deepcopy(run.model[0].weight).detach(),
    "pickle": _unpickled,
    "norm": lambda run: nn.utils.get_total_norm(list(run.model.parameters())).detach(),
    "vector": lambda run: nn.utils.parameters_to_vector(run.model.parameters()).detach(),
    "functional": lambda run: torch.func.functional_call(
        run.model, dict(run.model.named_parameters()), (batch_of(99, 1),)
    ).detach(),
    "func.grad": lambda run: torch.func.grad(lambda w: w.square().sum())(
        dict(run.model.named_parameters())["0.weight"]
    ).detach(),
    "broadcast": lambda run: hvd.broadcast_parameters(run.model.state_dict(), root_rank=0),
    "broadcast named": lambda run: hvd.broadcast_parameters(
        list(run.model.named_parameters()), root_rank=0
    ),
    "broadcast state": lambda run: hvd.broadcast_optimizer_state(run.optimizer, root_rank=0),
    "allreduce": lambda run: hvd.allreduce(run.model[0].weight.detach(), name="looked at"),
    "synchronize": lambda run: run.optimizer.zero_grad() or run.optimizer.synchronize(),
    "save": lambda run: _saved(run.model[0].weight),
}


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer).detach()


def _looked_at(name: str) -> Any:
    return compare(_weights_by(LOOKS[name]), optimizer="Adam")


@pytest.mark.parametrize("name", LOOKS)
def test_nobody_sees_a_stale_parameter(network2: RankPool, name: str):
    assert_same(network2.run(_looked_at, name))
