"""A sharded optimizer used as any other: each story is told twice, sharded and not."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.engine.runtime import runtime
from tests.ranks import RankPool, run_ranks
from tests.torch.training import batch_of, loss_of, my_rows, overlapping

Wrap = Callable[..., Any]
SHARDED, PLAIN = True, False


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def _backward(model: nn.Module, step: int) -> None:
    loss_of(model, my_rows(batch_of(step, hvd.size()))).backward()


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        _backward(model, step)
        optimizer.step()


def _closures(model: nn.Module, wrap: Wrap) -> None:
    optimizer = wrap(_adam(model.parameters()))
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, my_rows(batch_of(step, hvd.size())))
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0


def _scheduled(model: nn.Module, wrap: Wrap) -> None:
    base = _adam(model.parameters())
    before = torch.optim.lr_scheduler.StepLR(base, 2, gamma=0.5)
    optimizer = wrap(base)
    after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            _train(model, optimizer, range(step, step + 1))
            (before if step % 2 else after).step()


def _clipped(model: nn.Module, wrap: Wrap) -> None:
    optimizer = wrap(_adam(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        _backward(model, step)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()


def _scaled(model: nn.Module, wrap: Wrap, fused: bool = False) -> None:
    """One rank meets infinity in the second step."""
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.01, fused=fused))
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, my_rows(batch_of(step, hvd.size())))
        scaler.scale(loss * torch.inf if step == 1 and hvd.rank() == 1 else loss).backward()
        if step == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0


def _accumulated(model: nn.Module, wrap: Wrap) -> None:
    optimizer = wrap(_adam(model.parameters()), backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            _backward(model, 10 + step)
        _backward(model, step)
        _backward(model, 20 + step)
        optimizer.step()


def _added_group(model: Any, wrap: Wrap) -> None:
    optimizer = wrap(_adam(model[2].parameters()))
    _train(model, optimizer, range(2))
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
    model.zero_grad()
    _train(model, optimizer, range(2, 4))


def _thawed(model: Any, wrap: Wrap) -> None:
    model[0].requires_grad_(False)
    optimizer = wrap(_adam(model.parameters()))
    _train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    _train(model, optimizer, range(2, 4))


def _moved(model: nn.Module, wrap: Wrap) -> None:
    """The memory of parameters is replaced between steps."""
    optimizer = wrap(_adam(model.parameters()))
    _train(model, optimizer, range(2))
    for param in model.parameters():
        param.data = param.data.clone()
    _train(model, optimizer, range(2, 4))


def _had_state(model: nn.Module, wrap: Wrap) -> None:
    base = _adam(model.parameters())
    for step in range(2):
        base.zero_grad()
        loss_of(model, batch_of(step, hvd.size())).backward()
        base.step()
    optimizer = wrap(base)
    assert base.state is optimizer.state  # nobody keeps the whole
    _train(model, optimizer, range(2, 4))


def _grouped(model: nn.Module, wrap: Wrap) -> None:
    _train(model, wrap(_adam(model.parameters()), groups=2, op=hvd.Sum), range(3))


def _compressed(model: nn.Module, wrap: Wrap) -> None:
    optimizer = wrap(_adam(model.parameters()), compression=hvd.Compression.bf16)
    _train(model, optimizer, range(3))


def _hooked(model: nn.Module, wrap: Wrap) -> None:
    _train(model, wrap(_adam(model.parameters()), communication_hook=hvd.hooks.BF16()), range(3))


def _pickled(model: nn.Module, wrap: Wrap) -> None:
    optimizer = wrap(_adam(model.parameters()))
    _train(model, optimizer, range(2))
    other, copied = pickle.loads(pickle.dumps((model, optimizer)))
    _train(other, copied, range(2, 4))
    model.load_state_dict(other.state_dict())


def _copied(model: nn.Module, wrap: Wrap) -> None:
    optimizer = wrap(_adam(model.parameters()))
    _train(model, optimizer, range(2))
    other, copied = copy.deepcopy((model, optimizer))
    _train(model, optimizer, range(2, 3))
    _train(other, copied, range(2, 4))
    model.load_state_dict(other.state_dict())


STORIES: dict[str, Callable[..., None]] = {
    "closures": _closures,
    "schedulers": _scheduled,
    "clipping": _clipped,
    "scaler": _scaled,
    "scaler and fused": lambda model, wrap: _scaled(model, wrap, fused=True),
    "accumulation": _accumulated,
    "added group": _added_group,
    "thawed": _thawed,
    "moved": _moved,
    "had state": _had_state,
    "groups": _grouped,
    "compression": _compressed,
    "communication hook": _hooked,
    "pickle": _pickled,
    "deepcopy": _copied,
}


def _told_twice(name: str, overlap: bool) -> list[list[torch.Tensor]]:
    weights = []
    for shard in (SHARDED, PLAIN):
        model = _model()

        def wrap(optimizer: Any, *, shard: bool = shard, **options: Any) -> Any:
            return hvd.DistributedOptimizer(optimizer, shard_state=shard, **options)

        with overlapping(overlap):
            STORIES[name](model, wrap)
        weights.append([param.detach().clone() for param in model.parameters()])
    return weights


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", STORIES)
def test_same_weights(pool2: RankPool, name: str, overlap: bool):
    first, second = pool2.run(_told_twice, name, overlap)
    start = [param.detach() for param in _model().parameters()]
    for sharded, plain, there, before in zip(*first, second[0], start, strict=True):
        assert torch.equal(sharded, plain)
        assert torch.equal(sharded, there)
        assert not torch.equal(sharded, before)


def _hooks() -> list[Any]:
    """Step hooks of users see all parameters, updated, once a step."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(_adam(model.parameters()), shard_state=True)
    seen: list[Any] = []

    def look(*_: Any) -> None:
        (group,) = optimizer.param_groups
        assert group["params"] == list(model.parameters())
        seen.append([param.detach().clone() for param in group["params"]])

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    _train(model, optimizer, range(1))
    assert all(torch.equal(a, b) for a, b in zip(seen[1], model.parameters(), strict=True))
    return seen


def test_step_hooks(pool2: RankPool):
    first, second = pool2.run(_hooks)
    assert len(first) == 2
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _sparse(as_dense: bool) -> Any:
    torch.manual_seed(0)
    layer = nn.Embedding(60, 4, sparse=True)
    before = layer.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9),
        [("embedding", layer.weight)],
        sparse_as_dense=as_dense,
        shard_state=True,
    )
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.tensor([hvd.rank(), 50])).sum().backward()
        if not as_dense:
            with pytest.raises(ValueError, match=r"'embedding' has sparse.*sparse_as_dense=True"):
                optimizer.step()
            assert torch.equal(layer.weight, before)
        else:
            optimizer.step()
    return (before - layer.weight.detach()) / 0.1


def test_sparse_gradients(pool2: RankPool):
    pool2.run(_sparse, False)
    expected = torch.zeros(60, 4)
    expected[[0, 1]] = 0.5 * 2.9
    expected[50] = 2.9
    for moved in pool2.run(_sparse, True):
        torch.testing.assert_close(moved, expected)


class Elementwise(torch.optim.Optimizer):
    """One that says it may be cut."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1  # some keep their numbers in the group
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1 * group["count"])


class Unknown(Elementwise):
    """One that does not say what it needs."""

    elementwise = False


class Tensorwise(Unknown):
    """One that looks at all elements of a parameter to update one of them."""

    tensorwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / param.grad.norm(), alpha=0.1 * group["count"])


def _own_optimizer(kind: Any) -> list[Any]:
    weights = []
    for shard in (SHARDED, PLAIN):
        model = _model()
        optimizer = hvd.DistributedOptimizer(kind(model.parameters()), shard_state=shard)
        _train(model, optimizer, range(3))
        assert optimizer.param_groups[0]["count"] == 3
        weights.append([param.tolist() for param in model.parameters()])
    return weights


@pytest.mark.parametrize("kind", [Elementwise, Tensorwise])
def test_optimizers_of_others(pool2: RankPool, kind: Any):
    for sharded, plain in pool2.run(_own_optimizer, kind):
        assert sharded == plain


def _refused() -> None:
    matrix = nn.Parameter(torch.ones(8, 8))
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, Unknown):
        with pytest.raises(ValueError, match=f"set `{kind.__name__}.elementwise = True` or"):
            hvd.DistributedOptimizer(kind([matrix]), shard_state=True)
    with pytest.raises(ValueError, match="Adasum"):
        hvd.DistributedOptimizer(_adam([matrix]), op=hvd.Adasum, shard_state=True)
    gaps = nn.Parameter(torch.ones(8, 8)[:, ::2])
    with pytest.raises(ValueError, match=r"'gaps' have gaps or overlaps"):
        hvd.DistributedOptimizer(_adam([gaps]), [("gaps", gaps)], shard_state=True)
    elastic = dataclasses.replace(runtime.config, elastic=True)
    with (
        mock.patch.object(type(runtime), "config", elastic),
        pytest.raises(ValueError, match="elastic"),
    ):
        hvd.DistributedOptimizer(_adam([matrix]), shard_state=True)
    with pytest.raises(ValueError, match="shard_state of DistributedOptimizer differs"):
        hvd.DistributedOptimizer(_adam([matrix]), shard_state=hvd.rank() == 0)


def test_what_is_refused(pool2: RankPool):
    pool2.run(_refused)


def _pickled_elsewhere() -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(_adam(model.parameters()), shard_state=True)
    _train(model, optimizer, range(1))
    everyone = hvd.allgather_object(pickle.dumps((model, optimizer)))
    pickle.loads(everyone[hvd.rank()])
    with pytest.raises(ValueError, match="slices of that rank only"):
        pickle.loads(everyone[1 - hvd.rank()])


def test_pickled_by_another_rank(pool2: RankPool):
    pool2.run(_pickled_elsewhere)


def _joined(own_synchronize: bool) -> list[Any]:
    """The slices of a rank that has joined cannot be updated: all ranks hear of it, in time."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(_adam(model.parameters()), shard_state=True)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
    _train(model, optimizer, range(1))
    before = copy.deepcopy((list(model.parameters()), list(optimizer.state.values())))
    if own_synchronize:  # the rank that joins leaves between synchronize() and step()
        optimizer.zero_grad()
        _backward(model, 1)
        optimizer.synchronize()

    def proceed() -> None:
        if hvd.rank() == 1:
            hvd.join()
        elif own_synchronize:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            _train(model, optimizer, range(1, 2))

    with pytest.raises(hvd.HorovodInternalError) as caught:
        proceed()
    for phrase in ("rank 1", "has joined", "test_sharded_use.py", "shard_state=True"):
        assert phrase in str(caught.value)
    assert seen == ["step"]
    after = list(model.parameters()), list(optimizer.state.values())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    # Nobody counts as joined any more: training goes on, and an ordinary join ends it.
    _train(model, optimizer, range(2, 4))
    hvd.join()
    return [param.tolist() for param in model.parameters()]


@pytest.mark.parametrize("own_synchronize", [False, True])
def test_join(pool3: RankPool, own_synchronize: bool):
    results = pool3.run(_joined, own_synchronize)
    assert results[0] == results[1] == results[2]


def _in_set(rank: int, size: int) -> Any:
    chosen = hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[chosen])
    weights = []
    for shard in (SHARDED, PLAIN):
        model = _model()
        optimizer = hvd.DistributedOptimizer(
            _adam(model.parameters()), process_set=chosen, shard_state=shard
        )
        _train(model, optimizer, range(3))
        if shard:
            optimizer.consolidate_state_dict(to=2)
            if rank == 2 or rank == 0:  # rank 0 trains on its own
                assert len(optimizer.state_dict()["state"]) == 4
            if rank > 0:
                with pytest.raises(ValueError, match="load_state_dict"):
                    hvd.broadcast_optimizer_state(optimizer, 2)
        weights.append([param.tolist() for param in model.parameters()])
    return weights


def test_process_set():
    results = run_ranks(_in_set, 3)
    for sharded, plain in results:
        assert sharded == plain
    assert results[1] == results[2] != results[0]


def _single(rank: int, size: int) -> None:
    hvd.init()
    weights = []
    for shard in (SHARDED, PLAIN):
        model = _model()
        optimizer = hvd.DistributedOptimizer(_adam(model.parameters()), shard_state=shard)
        _train(model, optimizer, range(2))
        if shard:
            optimizer.consolidate_state_dict()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert len(saved["state"]) == 4
        weights.append([param.tolist() for param in model.parameters()])
    assert weights[0] == weights[1]


def test_one_rank():
    run_ranks(_single, 1)
