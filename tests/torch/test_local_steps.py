"""DistributedOptimizer(local_steps=...): what ranks make of their local steps together."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import horovod.torch as hvd
from tests.ranks import RankPool, run_ranks

Shape = tuple[int, ...]
LR = 0.5


def _slope(rank: int, step: int, index: int, shape: Shape) -> torch.Tensor:
    """The gradient of a parameter: whole numbers, so that halves of them add up exactly."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + index)
    return torch.randint(-4, 5, shape, generator=generator).double()


def _params(shapes: list[Shape]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(shape, 3.0, dtype=torch.float64)) for shape in shapes]


def _step(params: list[nn.Parameter], optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    for index, param in enumerate(params):
        param.backward(_slope(hvd.rank(), step, index, tuple(param.shape)))
    optimizer.step()


def _trained(shapes: list[Shape], steps: int, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """The parameters after each step."""
    params = _params(shapes)
    named = [(f"layer{index}.weight", param) for index, param in enumerate(params)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=LR), named, **options)
    history = []
    for step in range(1, steps + 1):
        _step(params, optimizer, step)
        history.append([param.detach().clone() for param in params])
    return history


def _reference(
    ranks: int, shape: Shape, index: int, steps: int, every: int, outer: hvd.OuterSGD | None
) -> list[torch.Tensor]:
    """What rank 0 has after each step, from the definition of DiLoCo and of Nesterov's momentum."""
    lr, momentum, nesterov = (1, 0, False) if outer is None else vars(outer).values()
    anchor, velocity = torch.full(shape, 3.0).double(), torch.zeros(shape).double()
    values, history = [anchor] * ranks, []
    for step in range(1, steps + 1):
        values = [v - LR * _slope(rank, step, index, shape) for rank, v in enumerate(values)]
        if step % every == 0:
            gradient = anchor - sum(values) / ranks
            velocity = momentum * velocity + gradient
            anchor = anchor - lr * (gradient + momentum * velocity if nesterov else velocity)
            values = [anchor] * ranks
        history.append(values[0])
    return history


outers = st.none() | st.builds(
    hvd.OuterSGD,
    lr=st.sampled_from([0.5, 1.0, 0.25]),
    momentum=st.sampled_from([0.0, 0.5]),
    nesterov=st.booleans(),
)
shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_synchronisation_is_the_definition(request: pytest.FixtureRequest, size: int):
    """Exact where the number of ranks is a power of two: all numbers are sums of halves then."""
    pool: RankPool = request.getfixturevalue(f"pool{size}")

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(shapes=shapes, every=st.integers(1, 4), outer=outers)
    def check(shapes: list[Shape], every: int, outer: hvd.OuterSGD | None) -> None:
        steps = 2 * every + 1
        results = pool.run(_trained, shapes, steps, {"local_steps": every, "outer": outer})
        for index, shape in enumerate(shapes):
            expected = _reference(size, shape, index, steps, every, outer)
            for step, value in enumerate(expected):
                torch.testing.assert_close(
                    results[0][step][index], value, rtol=0, atol=1e-12 if size == 3 else 0
                )
                if (step + 1) % every == 0:
                    for other in results[1:]:
                        assert torch.equal(other[step][index], results[0][step][index])

    check()


def test_delayed_synchronisation_is_the_definition(pool2: RankPool):
    """Sent after step s, applied after s + t to what each rank has then, mixed by alpha."""
    every, delay, alpha, steps, shape = 4, 2, 0.25, 11, (3,)
    options = {
        "local_steps": every,
        "delay": delay,
        "alpha": alpha,
        "outer": hvd.OuterSGD(0.5, 0.5),
    }
    results = pool2.run(_trained, [shape], steps, options)
    anchor, velocity = torch.full(shape, 3.0).double(), torch.zeros(shape).double()
    values, gradient = [anchor, anchor], anchor
    for step in range(1, steps + 1):
        values = [v - LR * _slope(rank, step, 0, shape) for rank, v in enumerate(values)]
        if step > delay and step % every == delay:
            velocity = 0.5 * velocity + gradient
            anchor = anchor - 0.5 * (gradient + 0.5 * velocity)
            values = [alpha * value + (1 - alpha) * anchor for value in values]
        if step % every == 0:
            gradient = anchor - sum(values) / 2
        for rank, value in enumerate(values):
            assert torch.equal(results[rank][step - 1][0], value), step


def test_fragments_take_turns(pool2: RankPool):
    one, other = pool2.run(_trained, [(6,)] * 3, 12, {"local_steps": 6, "fragments": 3})
    equal = [list(map(torch.equal, *steps)) for steps in zip(one, other, strict=True)]
    expected = [[step % 6 == turn for turn in (2, 4, 0)] for step in range(1, 13)]
    assert equal == expected


# -- what is kept, and going on ----------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def _wrapped(model: nn.Module, options: dict[str, Any]) -> Any:
    if options.get("average_buffers"):
        options = {**options, "average_buffers": model}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * hvd.rank() + step)
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def _values(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    momenta = [entry[key] for entry in optimizer.state.values() for key in sorted(entry)]
    return [tensor.detach().clone() for tensor in [*model.state_dict().values(), *momenta]]


def _resumed(options: dict[str, Any], before: int, steps: int, how: str) -> bool:
    """Whether a training that is interrupted ends with the bits of one that is not."""
    model = _model()
    optimizer = _wrapped(model, options)
    _train(model, optimizer, range(steps))
    expected = _values(model, optimizer)
    model = _model()
    optimizer = _wrapped(model, options)
    _train(model, optimizer, range(before))
    if how == "checkpoint":
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        model = _model()
        optimizer = _wrapped(model, options)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    elif how == "deepcopy":
        model, optimizer = copy.deepcopy((model, optimizer))
    else:
        model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    _train(model, optimizer, range(before, steps))
    return all(map(torch.equal, _values(model, optimizer), expected))


RESUMED = [
    {"local_steps": 3, "outer": hvd.OuterSGD()},
    {"local_steps": 4, "outer": hvd.OuterSGD(), "fragments": 2, "delay": 2},
    {"local_steps": 4, "delay": 3, "average_state": True, "average_buffers": True},
    {"local_steps": 2, "warmup_steps": 5},
]


@pytest.mark.parametrize("options", RESUMED)
def test_resuming_equals_no_interruption(pool2: RankPool, options: dict[str, Any]):
    for how in ("checkpoint", "deepcopy", "pickle"):
        for before in (4, 5, 7) if how == "checkpoint" else (5,):
            assert pool2.run(_resumed, options, before, 11, how) == [True, True], (how, before)


def _everything(options: dict[str, Any], steps: int) -> list[torch.Tensor]:
    model = _model()
    optimizer = _wrapped(model, options)
    _train(model, optimizer, range(steps))
    return _values(model, optimizer)


def test_state_and_buffers_stay_local_or_are_averaged(pool2: RankPool):
    base = {"local_steps": 3, "outer": hvd.OuterSGD()}
    averaging = {**base, "average_state": True, "average_buffers": True}
    assert all(map(torch.equal, *pool2.run(_everything, averaging, 6)))
    local = list(map(torch.equal, *pool2.run(_everything, base, 6)))
    num_params = 6
    names = list(_model().state_dict())
    unequal = {name for name, same in zip(names, local[: len(names)], strict=True) if not same}
    assert unequal == {"1.running_mean", "1.running_var"}
    momenta = local[len(names) :]  # for each parameter: two averages and a number of steps
    assert momenta == [False, False, True] * num_params


def _stepped(how: str) -> list[torch.Tensor]:
    """The parameters after four local steps, computed with one call of backward or otherwise."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model.load_state_dict({name: torch.ones_like(p) for name, p in model.named_parameters()})
    options: dict[str, Any] = {"local_steps": 2, "outer": hvd.OuterSGD(0.5, 0.5)}
    optimizer = _wrapped(
        model, {**options, "backward_passes_per_step": 2 if how == "passes" else 1}
    )

    def evaluate(data: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        for _ in range(2 if how == "passes" else 1):
            loss = model(data).square().mean()
            (loss / 2 if how == "passes" else loss).backward()
        return loss

    for step in range(3 if how == "end" else 4):
        generator = torch.Generator().manual_seed(100 * hvd.rank() + step)
        data = torch.randn(8, 4, generator=generator)
        if how == "closure":
            optimizer.step(lambda data=data: evaluate(data))
        else:
            evaluate(data)
            optimizer.step()
    if how == "end":
        mean = [hvd.allreduce(param.detach()) for param in model.parameters()]
        optimizer.synchronize_parameters()
        torch.testing.assert_close(list(model.parameters()), mean)
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("how", ["passes", "closure", "end"])
def test_other_ways_to_step(pool2: RankPool, how: str):
    one, other = pool2.run(_stepped, how)
    assert all(map(torch.equal, one, other))
    if how != "end":
        torch.testing.assert_close(one, pool2.run(_stepped, "usual")[0])


def _scaled() -> tuple[list[float], bool]:
    """A scaler skips a step on one rank alone; the ranks still synchronise in the same step."""
    params = _params([(2,)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=LR), local_steps=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for step in range(6):
        optimizer.zero_grad()
        factor = float("inf") if (step, hvd.rank()) == (1, 1) else 1.0
        scaler.scale((params[0] * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    everyone = hvd.allgather(params[0].detach()[None])
    return params[0].tolist(), bool((everyone == everyone[0]).all())


def test_a_step_that_a_scaler_skips_counts(pool2: RankPool):
    for _, same in pool2.run(_scaled):
        assert same


def _grown() -> list[torch.Tensor]:
    params = _params([(2,), (3,)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params[:1], lr=LR), local_steps=2, outer=hvd.OuterSGD(0.5, 0.5)
    )
    for step in range(1, 4):
        _step(params[:1], optimizer, step)
    optimizer.add_param_group({"params": params[1:]})
    for step in range(4, 7):
        _step(params, optimizer, step)
    return [param.detach() for param in params]


def test_parameters_may_be_added(pool2: RankPool):
    one, other = pool2.run(_grown)
    assert all(map(torch.equal, one, other))
    expected = _reference(2, (2,), 0, 6, 2, hvd.OuterSGD(0.5, 0.5))
    assert torch.equal(one[0], expected[-1])


def _handed_on() -> bool:
    """Rank 0 alone loads a checkpoint, and hands it on as scripts do."""
    options: dict[str, Any] = {"local_steps": 3, "outer": hvd.OuterSGD()}
    model = _model()
    optimizer = _wrapped(model, options)
    _train(model, optimizer, range(6))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model = _model()
    optimizer = _wrapped(model, options)
    if hvd.rank() == 0:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    ours, theirs = optimizer.state_dict()["local_steps"], saved[1]["local_steps"]
    return ours["num_steps"] == 6 and all(
        torch.equal(mine["momenta"][name], other["momenta"][name])
        for mine, other in zip(ours["fragments"], theirs["fragments"], strict=True)
        for name in other["momenta"]
    )


def test_broadcast_optimizer_state_hands_on_the_outer_state(pool2: RankPool):
    assert pool2.run(_handed_on) == [True, True]


def _clustered(rank: int, size: int) -> tuple[list[list[torch.Tensor]], bool]:
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]
    hvd.init(process_sets=sets)
    mine = sets[rank // 2]
    options = {"local_steps": 3, "within": mine, "warmup_steps": 2}
    history = _trained([(4,), (2, 3)], 8, options)
    by_host = _trained([(4,), (2, 3)], 8, {**options, "within": "host"})
    for ours, theirs in zip(by_host, history, strict=True):
        assert all(map(torch.equal, ours, theirs))
    model = _model()
    optimizer = _wrapped(model, options)
    with pytest.raises(ValueError, match="belongs to"):
        _wrapped(_model(), {**options, "within": sets[1 - rank // 2]})
    copied = pickle.loads(pickle.dumps(optimizer))
    return history, copied._chosen.within.ranks == mine.ranks


def _on_two_hosts(rank: int) -> dict[str, str]:
    host, local = divmod(rank, 2)
    return {
        "HOROVOD_HOSTNAME": f"host{host}",
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": str(host),
        "HOROVOD_CROSS_SIZE": "2",
    }


def test_clusters_step_together_and_meet_now_and_then():
    results = [history for history, _ in run_ranks(_clustered, 4, env=_on_two_hosts)]
    for step in range(1, 9):
        equal = [
            [all(map(torch.equal, results[a][step - 1], results[b][step - 1])) for b in range(4)]
            for a in range(4)
        ]
        together = step <= 2 or step in (5, 8)
        expected = [[together or a // 2 == b // 2 for b in range(4)] for a in range(4)]
        assert equal == expected, step
