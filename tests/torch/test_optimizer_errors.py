"""What DistributedOptimizer refuses, and that the job goes on afterwards."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from tests.ranks import RankPool
from tests.torch.training import overlapping


def _model(inputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, 2))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _still_usable() -> list[list[float]]:
    """Train a step and return the weights, which must be everybody's."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    model(torch.full((2, 3), 1.0 + hvd.rank())).sum().backward()
    optimizer.step()
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
    return [p.flatten().tolist() for p in model.parameters()]


def _named(how: str, model: nn.Module) -> Any:
    named = list(model.named_parameters())
    return {
        "bare": [p for _, p in named],
        "lists": [list(entry) for entry in named],
        "triples": [(name, p, 1) for name, p in named],
        "duplicate": [("same", p) for _, p in named],
        "missing": named[1:],
        "empty": [],
    }[how]


def _groups(how: str, model: Any) -> Any:
    weight, bias = model[0].weight, model[0].bias
    return {
        "zero": 0,
        "negative": -1,
        "boolean": True,
        "text": "all",
        "flat": [weight, bias],
        "twice": [[weight], [bias, weight]],
        "twice in one": [[weight, weight]],
        "not a tensor": [["0.weight"]],
        "foreign": [[nn.Parameter(torch.ones(2))]],
    }[how]


def _refused(make: Callable[..., Any], how: str, only: int | None, options: dict[str, Any]) -> Any:
    """The error where rank `only` (or everyone) passes what is wrong, and a step afterwards."""
    model = _model()
    wrong = only in (None, hvd.rank())
    key = "named_parameters" if make is _named else "groups"
    arguments = {key: make(how, model)} if wrong else {}
    with pytest.raises(ValueError) as caught:
        hvd.DistributedOptimizer(_sgd(model), **arguments, **options)
    return str(caught.value), _still_usable()


WRONG = [
    (_named, "bare", "tuples"),
    (_named, "lists", "tuples"),
    (_named, "triples", "tuples"),
    (_named, "duplicate", "more than once: same"),
    (_named, "missing", r"misses 1 parameters.*\[4, 3\]"),
    (_named, "empty", "misses 4 parameters"),
    (_groups, "zero", "positive"),
    (_groups, "negative", "positive"),
    (_groups, "boolean", "positive number"),
    (_groups, "text", "list of lists"),
    (_groups, "flat", "list of lists"),
    (_groups, "twice", "twice"),
    (_groups, "twice in one", "twice"),
    (_groups, "not a tensor", "not str"),
    (_groups, "foreign", "not optimized"),
]


@pytest.mark.parametrize("only", [None, 1])
@pytest.mark.parametrize(("make", "how", "message"), WRONG, ids=[row[1] for row in WRONG])
def test_wrong_names_and_groups(
    pool2: RankPool, make: Callable[..., Any], how: str, message: str, only: int | None
):
    results = pool2.run(_refused, make, how, only, {})
    for error, weights in results:
        assert re.search(message, error), error
        assert weights == results[0][1]
    if only is not None:
        assert "rank 1 could not" in results[0][0]


def _broken_names(model: nn.Module) -> Any:
    yield from list(model.named_parameters())[:1]
    raise KeyError("no more names")


def _value(how: str, model: nn.Module, wrapped: Any) -> dict[str, Any]:
    return {
        "no passes": {"backward_passes_per_step": 0},
        "negative passes": {"backward_passes_per_step": -1},
        "passes in words": {"backward_passes_per_step": "two"},
        "predivided sum": {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        "predivided Adasum": {"op": hvd.Adasum, "gradient_predivide_factor": 2.0},
        "predivided by nothing": {"gradient_predivide_factor": 0.0},
        "op": {"op": 17},
        "op in words": {"op": "average"},
        "compression": {"compression": "fp16"},
        "names": {"named_parameters": _broken_names(model)},
        "no names": {"named_parameters": 5},
        "LBFGS": {"op": hvd.Adasum, "optimizer": torch.optim.LBFGS(model.parameters())},
        "wrapped": {"optimizer": wrapped},
        "no optimizer": {"optimizer": model},
    }[how]


VALUES = {
    "no passes": "backward_passes_per_step must be positive, not 0",
    "negative passes": "must be positive, not -1",
    "passes in words": "must be positive, not 'two'",
    "predivided sum": "op=Average",
    "predivided Adasum": "op=Average",
    "predivided by nothing": "gradient_predivide_factor must be a positive number",
    "op": r"op must be .*not 17",
    "op in words": "op must be .*not 'average'",
    "compression": "compression must be a compressor",
    "names": "no more names",
    "no names": "not iterable",
    "LBFGS": "LBFGS evaluates the closure several times",
    "wrapped": "already",
    "no optimizer": r"must be a torch\.optim\.Optimizer",
}


def _wrong_value(how: str, only: int | None) -> Any:
    model = _model()
    wrapped = hvd.DistributedOptimizer(_sgd(model))
    given: dict[str, Any] = {"optimizer": _sgd(model)}
    if only in (None, hvd.rank()):
        given |= _value(how, model, wrapped)
    with pytest.raises((ValueError, TypeError, KeyError)) as caught:
        hvd.DistributedOptimizer(**given)
    return str(caught.value), _still_usable()


@pytest.mark.parametrize("only", [None, 1])
@pytest.mark.parametrize("how", VALUES)
def test_wrong_values(pool2: RankPool, how: str, only: int | None):
    """Also where one rank alone has them: the others must not wait for it."""
    results = pool2.run(_wrong_value, how, only)
    for error, weights in results:
        assert re.search(VALUES[how], error), error
        assert weights == results[0][1]
    if only is not None:
        assert "rank 1 could not make its DistributedOptimizer" in results[0][0]


def _wrong_later() -> None:
    model = _model()
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = hvd.DistributedOptimizer(_sgd(model), num_groups=2)
    with pytest.raises(ValueError, match="must be positive"):
        optimizer.set_backward_passes_per_step(0)
    for wrong in (hvd.ProcessSet([0]), "everybody", None):
        with pytest.raises(ValueError, match=r"process_set must be|not registered"):
            hvd.DistributedOptimizer(_sgd(model), process_set=wrong)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_wrong_values_later(pool2: RankPool):
    pool2.run(_wrong_later)


def _too_many(overlap: bool, no_sync: bool) -> Any:
    model = _model()
    with overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            _sgd(model), model.named_parameters(), backward_passes_per_step=2
        )
        for later in (False, True):
            x = torch.ones(1, 3)
            model(x).sum().backward()
            model(x).sum().backward()
            loss = model(x).sum()
            context = optimizer.no_sync() if no_sync else contextlib.nullcontext()
            with context, pytest.raises(AssertionError, match="raise backward_passes_per_step"):
                loss.backward()
            if overlap and later:  # the third pass was added to what was being reduced
                with pytest.raises(RuntimeError, match="was changed between backward"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return _still_usable()


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_too_many_backward_passes(pool2: RankPool, overlap: bool, no_sync: bool):
    first, second = pool2.run(_too_many, overlap, no_sync)
    assert first == second


def _zero_grad(overlap: bool, set_to_none: bool) -> Any:
    model = _model()
    with overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            for parameter in model.parameters():
                if set_to_none:
                    assert parameter.grad is None
                else:
                    assert not parameter.grad.any()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.synchronize()
            optimizer.zero_grad(set_to_none)
            optimizer.zero_grad()
        # Half of the passes: nothing is being reduced, so there is nothing to guard.
        optimizer.set_backward_passes_per_step(2)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.zero_grad()
        optimizer.step()
    return _still_usable()


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_zero_grad_between_backward_and_step(pool2: RankPool, overlap: bool, set_to_none: bool):
    first, second = pool2.run(_zero_grad, overlap, set_to_none)
    assert first == second


def _differing(how: str, op: str) -> tuple[str, Any]:
    odd = hvd.rank() == hvd.size() - 1
    model = _model(5 if odd and how == "shape" else 3)
    if odd and how == "count":
        model.append(nn.Linear(2, 2))
    if odd and how == "dtype":
        model.double()
    named = [
        (f"other.{name}" if odd and how == "names" else name, p)
        for name, p in model.named_parameters()
    ]
    if odd and how == "order":
        named = [named[1], named[0], *named[2:]]
    options: dict[str, Any] = {"op": getattr(hvd, op)}
    if odd and how == "groups":
        options["groups"] = 2
    if odd and how == "compression":
        options["compression"] = hvd.Compression.fp16
    with pytest.raises(ValueError) as caught:
        hvd.DistributedOptimizer(_sgd(model), named, **options)
    return str(caught.value), _still_usable()


DIFFERENCES = {
    "names": ["other.0.weight", "0.weight"],
    "count": ["4 and 6 parameters", "3.weight"],
    "shape": ["0.weight", "[4, 3]", "[4, 5]"],
    "dtype": ["0.weight", "float32", "float64"],
    "order": ["0.weight", "0.bias"],
    "groups": ["groups", "None"],
    "compression": ["compression", "FP16Compressor"],
}


@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("how", DIFFERENCES)
def test_models_that_differ(pool2: RankPool, how: str, op: str):
    _check_differing(pool2, how, op)


def test_models_that_differ_on_three_ranks(pool3: RankPool):
    _check_differing(pool3, "shape", "Average")


def _check_differing(pool: RankPool, how: str, op: str) -> None:
    results = pool.run(_differing, how, op)
    for error, weights in results:
        assert f"ranks 0 and {pool.size - 1}" in error
        for part in DIFFERENCES[how]:
            assert part in error, error
        assert weights == results[0][1]


def _added_while_reducing() -> Any:
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(AssertionError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.step()
    return _still_usable()


def test_param_group_added_between_backward_and_step(pool2: RankPool):
    first, second = pool2.run(_added_while_reducing)
    assert first == second


def _added_wrongly(op: str) -> Any:
    """One rank adds what cannot be added: nobody gets a new group, and training goes on."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), op=getattr(hvd, op))
    more = nn.Parameter(torch.ones(2))
    group = {"params": [more if hvd.rank() == 0 else model[0].weight]}
    with pytest.raises(ValueError, match="more than one parameter group") as caught:
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return str(caught.value), _still_usable()


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_param_group_added_wrongly_on_one_rank(pool2: RankPool, op: str):
    first, second = pool2.run(_added_wrongly, op)
    assert "rank 1 could not" in first[0]
    assert first[1] == second[1]


def _loaded_between(sparse: bool) -> Any:
    """State is loaded while gradients are being reduced; one rank comes late to that."""
    torch.manual_seed(0)
    model: Any = nn.Embedding(9, 2, sparse=True) if sparse else _model()
    data = torch.tensor([1, 2, hvd.rank()]) if sparse else torch.ones(1, 3) + hvd.rank()
    with overlapping(True):
        optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
        model(data).sum().backward()
        optimizer.step()  # names and buckets are known now
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(3):
            if hvd.rank() == 1:
                time.sleep(0.1)  # long enough for rank 0 to run into requests of its own
            model(data).sum().backward()
            optimizer.load_state_dict(saved)
            optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        model(data).sum().backward()
        optimizer.step()
    return [p.flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("sparse", [False, True])
def test_state_loaded_between_backward_and_step(pool2: RankPool, sparse: bool):
    first, second = pool2.run(_loaded_between, sparse)
    assert first == second


def _frozen_on_one_rank() -> Any:
    """Only seen when reducing: an error on every rank, not a hang."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    if hvd.rank() == 1:
        model[0].requires_grad_(False)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return [p.flatten().tolist() for p in model.parameters()]


def test_frozen_on_one_rank(pool2: RankPool):
    first, second = pool2.run(_frozen_on_one_rank)
    assert first == second
