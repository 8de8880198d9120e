"""broadcast_optimizer_state for every optimizer of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod.torch as hvd
from tests.ranks import RankPool

# Options that bring as much state as possible into being.
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "dampening": 0},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True, "betas": (0.8, 0.9)},
    "AdamW": {"weight_decay": 0.3},
    "ASGD": {"lambd": 0.01},
}
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS")
)


def _make(name: str, lr: float) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    if name == "SparseAdam":
        layer = torch.nn.Embedding(4, 3, sparse=True)
        parameters = [layer.weight]
    else:
        # Two dimensions each: Muon takes nothing else. The last one is frozen.
        parameters = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
        parameters[2].requires_grad_(name in ("Muon",))
    optimizer = getattr(torch.optim, name)(parameters, lr=lr, **OPTIONS.get(name, {}))
    return parameters, optimizer


def _train(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        optimizer.zero_grad()
        for number, parameter in enumerate(parameters):
            if not parameter.requires_grad:
                continue
            gradient = torch.full_like(parameter, 0.5 + number + step + hvd.rank())
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
        optimizer.step()


def _plain(value: Any) -> Any:
    """Something that compares by value, types included."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.flatten().tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_plain(item) for item in value]
    return type(value).__name__, value


def _broadcast(name: str, trained: list[bool]) -> tuple[Any, Any, bool]:
    """The optimizer's state before and after, and whether parameters were left alone."""
    parameters, optimizer = _make(name, lr=0.1 * (hvd.rank() + 1))
    if trained[hvd.rank()]:
        _train(parameters, optimizer)
    values = [parameter.detach().clone() for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters]
    before = _plain(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    untouched = all(
        torch.equal(parameter, value)
        and (parameter.grad is gradient or (gradient is None and not parameter.grad.any()))
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True)
    )
    return before, _plain(optimizer.state_dict()), untouched


@pytest.mark.parametrize("trained", [[True, False], [False, True], [True, True], [False, False]])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_rank_gets_the_roots_state(pool2: RankPool, name: str, trained: list[bool]):
    root, other = pool2.run(_broadcast, name, trained)
    if trained[0]:
        assert root[0] == root[1]
    assert root[0]["param_groups"] == root[1]["param_groups"]
    assert other[1] == root[1]
    assert root[2]
    assert other[2]
    assert root[1]["state"]


class Homemade(torch.optim.Optimizer):
    """Somebody's own: makes its state in step, like those of old versions of torch."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    mean = state.setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(0.5).add_(parameter.grad)
                    parameter.sub_(group["lr"] * mean / state["step"])


def _fresh(name: str, distributed: bool) -> tuple[bool, list[str], list[Any]]:
    """What a fresh optimizer gets, and whether a step then is that of one left alone."""

    def make() -> tuple[list[torch.nn.Parameter], Any]:
        if name != "Homemade":
            return _make(name, lr=0.1)
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(4, 3))]
        return parameters, Homemade(parameters, lr=0.1)

    (parameters, optimizer), (others, alone) = make(), make()
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    entries = sorted({entry for state in optimizer.state.values() for entry in state})
    has_state = [parameter in optimizer.state for parameter in parameters]
    for chosen, steps in ((parameters, optimizer), (others, alone)):
        for parameter in chosen:
            if parameter.requires_grad:
                gradient = torch.full_like(parameter, 0.7)
                parameter.grad = gradient.to_sparse(1) if name == "SparseAdam" else gradient
        steps.step()
    same = all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    frozen = [has for has, p in zip(has_state, parameters, strict=True) if not p.requires_grad]
    is_lean = name == "Adagrad" or not any(frozen)  # which gives its state to all in the beginning
    return same and is_lean, entries, has_state


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "Homemade"])
def test_a_fresh_optimizer_gets_the_state_that_it_begins_with(
    pool2: RankPool, name: str, distributed: bool
):
    for same, entries, has_state in pool2.run(_fresh, name, distributed):
        assert same
        assert entries
        assert has_state[0]
        if "Adam" in name:
            assert {"step", "exp_avg"} <= set(entries)
        elif name == "SGD":
            assert entries == ["momentum_buffer"]


def _train_on(name: str) -> list[Any]:
    """A rank that resumed from a checkpoint and one that did not train alike afterwards."""
    parameters, optimizer = _make(name, lr=0.1)
    if hvd.rank() == 0:
        _train(parameters, optimizer)
    hvd.broadcast_parameters([p.data for p in parameters], 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return [parameter.tolist() for parameter in parameters]


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SparseAdam"])
def test_training_goes_on_alike(pool2: RankPool, name: str):
    first, second = pool2.run(_train_on, name)
    assert first == second


def _gradients(is_sparse: bool) -> tuple[bool, bool, bool]:
    """What a script of 0.28.1 does: broadcast the gradients of a fresh optimizer, then train."""

    def trained(is_broadcast: bool, set_to_none: bool) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(2)
        table = torch.nn.Embedding(5, 4, sparse=is_sparse)
        model = torch.nn.Sequential(table, torch.nn.Linear(4, 1))
        model[1].bias.requires_grad_(False)
        kind = torch.optim.SGD if is_sparse else torch.optim.AdamW
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), lr=0.1), model.named_parameters()
        )
        first: list[Any] = []
        if is_broadcast:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
            found = [parameter.grad for parameter in model.parameters()]
            dense = [grad for grad in found if grad is not None and not grad.is_sparse]
            hvd.broadcast_parameters(dense, root_rank=0)
            first = [None if grad is None else grad.clone() for grad in found]
        for step in range(3):
            if step:
                optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.arange(2) + hvd.rank() + step).square().sum().backward()
            optimizer.step()
        return first, [parameter.detach() for parameter in model.parameters()]

    (table, weight, bias), _ = trained(True, True)
    zeros = not (table.to_dense() if table.is_sparse else table).any() and not weight.any()
    same = all(
        torch.equal(mine, other)
        for set_to_none in (True, False)
        for mine, other in zip(
            trained(True, set_to_none)[1], trained(False, set_to_none)[1], strict=True
        )
    )
    return bool(zeros), table.is_sparse == is_sparse and bias is None, same


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_fresh_optimizer_has_gradients_that_can_be_broadcast(pool2: RankPool, is_sparse: bool):
    for zeros, is_as_trained, same in pool2.run(_gradients, is_sparse):
        assert zeros
        assert is_as_trained  # sparse where the model's are, none for what is not trained
        assert same


def _options() -> list[Any]:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    root = hvd.rank() == 0
    optimizer = torch.optim.Adam(
        [
            {"params": parameters[:1], "lr": 0.5 if root else 1},
            {"params": parameters[1:], "betas": (0.5, 0.6) if root else (0.1, 0.2)},
        ],
        lr=torch.tensor(0.25) if root else 3,
        amsgrad=root,
    )
    if root:
        optimizer.param_groups[0]["note"] = ["any", {"thing": True}]
    else:
        optimizer.param_groups[1]["extra"] = 3
    hvd.broadcast_optimizer_state(optimizer, 0)
    return [_plain({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]


def test_options_keep_their_types(pool2: RankPool):
    first, second = pool2.run(_options)
    assert first == second
    assert first[0]["lr"] == ("float", 0.5)
    assert first[0]["note"] == ("list", [("str", "any"), {"thing": ("bool", True)}])
    assert first[1]["betas"] == ("tuple", [("float", 0.5), ("float", 0.6)])
    assert first[1]["lr"] == ("torch.float32", (), [0.25])
    assert first[1]["amsgrad"] == ("bool", True)
    assert "extra" not in first[1]


def _keeps_identity() -> bool:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.full((2,), float(hvd.rank()))
    optimizer.step()
    buffer = optimizer.state[parameter]["momentum_buffer"]
    hvd.broadcast_optimizer_state(optimizer, 1)
    same = optimizer.state[parameter]["momentum_buffer"] is buffer
    return same and buffer.tolist() == [1.0, 1.0]


def test_tensors_that_fit_are_filled_in_place(pool2: RankPool):
    assert pool2.run(_keeps_identity) == [True, True]


def _lbfgs() -> bool:
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    return True


def test_lbfgs_is_refused(pool2: RankPool):
    assert pool2.run(_lbfgs) == [True, True]


def _different_parameters() -> float:
    parameter = torch.nn.Parameter(torch.ones(2 + hvd.rank()))
    with pytest.raises(ValueError, match=r"rank\(s\) \[1\]"):
        hvd.broadcast_optimizer_state(torch.optim.SGD([parameter], lr=0.1), 0)
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum))


def test_optimizers_of_different_models_raise_everywhere(pool2: RankPool):
    assert pool2.run(_different_parameters) == [2.0, 2.0]
