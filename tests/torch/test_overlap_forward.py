"""DistributedOptimizer(overlap_forward=model): the parameters of an ordinary step, made later."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import horovod.torch as hvd
from horovod.torch.gradients import bucketing
from tests.effort import examples
from tests.ranks import RankPool
from tests.torch.delaying import (
    ALL,
    ALL_MODELS,
    ALL_OPTIMIZERS,
    EVERY_OTHER,
    NETWORK,
    NONE,
    SCHEDULERS,
    Run,
    assert_same,
    compare,
    small_buckets,
)
from tests.torch.training import batch_of, my_rows, weights_of


@pytest.fixture(scope="module")
def network2() -> Iterator[RankPool]:
    pool = RankPool(2, NETWORK)
    yield pool
    pool.close()


# -- the same parameters --------------------------------------------------------------------


def _trained(steps: int, passes: int, zero: str, options: dict[str, Any]) -> Any:
    def train(run: Run) -> Any:
        for _ in range(steps):
            run.step(passes, zero)
        return run.optimizer.state_dict()["state"]

    return compare(train, **options, backward_passes_per_step=passes)


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    model=st.sampled_from(sorted(ALL_MODELS)),
    optimizer=st.sampled_from(sorted(ALL_OPTIMIZERS)),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    steps=st.integers(4, 7),
    passes=st.integers(1, 2),
    zero=st.sampled_from(["before", "after", "between", "zeros", "model", "never"]),
    arrived=st.sampled_from([NONE, EVERY_OTHER, ALL]),
    early=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_same_as_without(network2: RankPool, steps: int, passes: int, zero: str, **options: Any):
    passes = 1 if zero == "between" else passes
    assert_same(network2.run(_trained, steps, passes, zero, options))


@pytest.mark.parametrize("model", ALL_MODELS)
def test_models(network2: RankPool, model: str):
    assert_same(network2.run(_trained, 6, 1, "before", {"model": model}))


@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_optimizers(network2: RankPool, optimizer: str):
    options = {"optimizer": optimizer, "scheduler": "step"}
    assert_same(network2.run(_trained, 6, 1, "before", options))


@pytest.mark.parametrize("arrived", [EVERY_OTHER, ALL], ids=["every other", "all"])
def test_what_has_arrived_is_updated_at_once(network2: RankPool, arrived: slice):
    options = {"model": "keeps", "optimizer": "Adam", "arrived": arrived}
    assert_same(network2.run(_trained, 6, 1, "before", options))


@pytest.mark.parametrize("model", ALL_MODELS)
def test_some_buckets_begin_in_backward(network2: RankPool, model: str):
    options = {"model": model, "optimizer": "Adam", "early": 0.5}
    assert_same(network2.run(_trained, 5, 1, "before", options))


def _trained_while_looking(model: str, more: list[float], hooked: int) -> Any:
    """Divide anew after every step, as if the network had rested at backward's end."""
    parts = iter(more)

    def hides_more(num_bytes: int, hidden: float, idle: float, rate: float) -> float | None:
        part = next(parts, None)
        return None if part is None else part * num_bytes

    def train(run: Run) -> Any:
        if hvd.rank() == hooked:  # this rank's steps are ordinary ones
            run.optimizer.register_step_pre_hook(lambda *_: None)
        for _ in range(len(more) + 4):
            run.step()
        return run.optimizer.state_dict()["state"]

    results = []
    with small_buckets(), mock.patch("horovod.torch.gradients.forward_schedule.LOOK_STEPS", 1):
        with (
            mock.patch("horovod.torch.gradients.forward_schedule.hides_more", hides_more),
            mock.patch("horovod.torch.gradients.forward_schedule.num_hidden", bucketing.num_hidden),
        ):
            run = Run(True, model=model, optimizer="Adam")
            seen = train(run)
            results.append((weights_of(run.model), seen))
            assert next(parts, None) is None, "there was a look after every step"
            assert (max(run.delayed) > 0) == (hvd.rank() != hooked)
        run = Run(False, model=model, optimizer="Adam")
        seen = train(run)
        results.append((weights_of(run.model), seen))
    return results


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    model=st.sampled_from(sorted(ALL_MODELS)),
    more=st.lists(st.floats(0, 1.2), max_size=5),
    hooked=st.integers(0, 2),
)
def test_buckets_are_divided_anew_between_steps(
    network2: RankPool, model: str, more: list[float], hooked: int
):
    assert_same(network2.run(_trained_while_looking, model, more, hooked))


def _uneven(early: float) -> Any:
    """Another layer less is used on each rank, so that its bucket is not complete before."""

    def train(run: Run) -> None:
        for number in range(5):
            run.optimizer.zero_grad()
            x = my_rows(batch_of(number, hvd.size()))
            for layer in run.model.layers[: 3 - hvd.rank()]:
                x = torch.tanh(layer(x))
            x.sum().backward()
            run.optimizer.step()
            run.note()

    return compare(train, model="keeps", early=early)


@pytest.mark.parametrize("early", [0.0, 0.5, 1.0])
def test_what_one_rank_does_not_use(network2: RankPool, early: float):
    assert_same(network2.run(_uneven, early))


def _compressed(early: float) -> Any:
    return compare(
        lambda run: [run.step() for _ in range(5)], early=early, compression=hvd.Compression.bf16
    )


@pytest.mark.parametrize("early", [0.0, 0.5])
def test_compression(network2: RankPool, early: float):
    assert_same(network2.run(_compressed, early))


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


def _scripted(run: Run) -> torch.Tensor:
    """A copy that has the same parameters, and uses them where Python does not see it."""
    if "scripted" not in run.__dict__:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.__dict__["scripted"] = torch.jit.script(run.model)
    with torch.no_grad():
        return run.__dict__["scripted"](batch_of(99, 1))


def _unpickled(run: Run) -> Any:
    model, optimizer = pickle.loads(pickle.dumps((run.model, run.optimizer)))
    return weights_of(model), optimizer.state_dict()["state"]


def _total_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    if hasattr(nn.utils, "get_total_norm"):  # since torch 2.6
        return nn.utils.get_total_norm(parameters)
    return torch.stack([parameter.norm() for parameter in parameters]).norm()


def _aliased(run: Run) -> Any:
    """Tensors that share the memory of parameters from the start on."""
    if "aliases" not in run.__dict__:
        layer = run.model[0]
        run.__dict__["aliases"] = layer.weight.detach(), layer.bias.detach().numpy()
    weight, bias = run.__dict__["aliases"]
    return weight.clone(), bias.tolist()


LOOKS: dict[str, Callable[[Run], Any]] = {
    "eval": _evaluated,
    "inference": _inferred,
    "autocast": _autocast,
    "a layer alone": lambda run: run.model[2](torch.ones(1, 8)).detach(),
    "state_dict": lambda run: copy.deepcopy(run.model.state_dict()),
    "optimizer state_dict": lambda run: copy.deepcopy(run.optimizer.state_dict()),
    "optimizer state": lambda run: copy.deepcopy(list(run.optimizer.state.values())),
    "kept list": _kept,
    "aliases": _aliased,
    "scripted": _scripted,
    "in a list": lambda run: torch.cat([run.model[0].bias, run.model[2].bias]).detach(),
    "an attribute": lambda run: run.model[0].weight.detach().clone(),
    "data": lambda run: run.model[0].weight.data.clone(),
    "numpy": lambda run: run.model[0].bias.detach().numpy().tolist(),
    "print": lambda run: repr(run.model[0].bias),
    "gradients": lambda run: [p.grad.clone() for p in run.model.parameters()],
    "one gradient": lambda run: run.model[2].bias.grad.clone(),
    "deepcopy": lambda run: weights_of(copy.deepcopy(run.model)),
    "deepcopy of a parameter": lambda run: copy.deepcopy(run.model[0].weight).detach(),
    "pickle": _unpickled,
    "norm": lambda run: _total_norm(list(run.model.parameters())).detach(),
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
    return torch.load(buffer, weights_only=True).detach()


def _looked_at(name: str) -> Any:
    return compare(_weights_by(LOOKS[name]), optimizer="Adam")


@pytest.mark.parametrize("name", LOOKS)
def test_nobody_sees_a_stale_parameter(network2: RankPool, name: str):
    assert_same(network2.run(_looked_at, name))
