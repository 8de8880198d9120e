"""What the optimizers tell `hvd.stats()`: steps, time in backward, buckets, what overlap hides."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.engine.runtime import runtime
from tests.ranks import RankPool, check_times, run_ranks

STEPS = 4


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def stats_between_rounds() -> dict[str, Any]:
    """While no round is being counted: a thread completes requests before it has counted all."""
    with runtime.channel(0).driving:
        return hvd.stats()


def changes(function: Any) -> dict[str, Any]:
    before = stats_between_rounds()
    function()
    after = stats_between_rounds()
    numbers = [key for key, value in after.items() if isinstance(value, (int, float))]
    return {key: after[key] - before[key] for key in numbers} | {"last": after["last_step_seconds"]}


def train(kind: str) -> dict[str, Any]:
    net = model()
    options: dict[str, Any] = {}
    passes, base = 1, torch.optim.SGD(net.parameters(), lr=0.01)
    if kind == "adasum":
        options["op"] = hvd.Adasum
    elif kind == "sharded":
        options["shard_state"] = True
    elif kind == "overlap_forward":
        options["overlap_forward"] = net
    elif kind == "passes":
        options["backward_passes_per_step"] = passes = 3
    elif kind == "lbfgs":
        base = torch.optim.LBFGS(net.parameters(), max_iter=2)
    optimizer = hvd.DistributedOptimizer(base, named_parameters=net.named_parameters(), **options)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 8)).square().sum()
        loss.backward()
        return loss

    def run() -> None:
        for _ in range(STEPS):
            if kind == "lbfgs":
                optimizer.step(evaluate)
                continue
            for _ in range(passes):
                net(torch.ones(2, 8)).sum().backward()
            if kind == "clipping":
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()

    return changes(run)


KINDS = ["plain", "adasum", "sharded", "overlap_forward", "passes", "lbfgs", "clipping"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_optimizer_counts_its_steps(pool2: RankPool, kind: str):
    for numbers in pool2.run(train, kind):
        assert numbers["steps"] == STEPS
        assert numbers["step_seconds"] > 0
        assert numbers["last"] > 0
        assert numbers["buckets"] >= STEPS
        assert numbers["bytes_reduced"] >= STEPS * 46 * 4
        if kind != "adasum":  # which reduces steps, not gradients
            assert 0 < numbers["backward_seconds"] <= numbers["step_seconds"]


def one_rank(rank: int, size: int) -> dict[str, Any]:
    hvd.init()
    return train("plain")


def test_one_rank_has_steps_too():
    (numbers,) = run_ranks(one_rank, 1)
    assert numbers["steps"] == STEPS
    assert numbers["step_seconds"] > 0
    assert (numbers["backward_seconds"], numbers["bytes_shared_memory"]) == (0, 0)


def only_operations() -> dict[str, Any]:
    return changes(lambda: [hvd.allreduce(torch.ones(5), name="only") for _ in range(3)])


def test_a_script_without_an_optimizer_has_no_steps(pool2: RankPool):
    for numbers in pool2.run(only_operations):
        assert (numbers["steps"], numbers["step_seconds"], numbers["buckets"]) == (0, 0, 0)
        assert (numbers["operations"], numbers["bytes_reduced"]) == (3, 60)
        assert numbers["wait_seconds"] > 0
        assert numbers["reduce_seconds"] > 0


class Slow(torch.autograd.Function):
    """Takes its time in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return gradient


def slow_backward(rank: int, size: int) -> dict[str, Any]:
    """The gradients of the last layer come 0.1 s before those of the first."""
    hvd.init()
    first, last = torch.nn.Linear(8, 400), torch.nn.Linear(400, 2)
    params = [*first.parameters(), *last.parameters()]
    named = [(str(index), param) for index, param in enumerate(params)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.01), named_parameters=named, groups=[params[2:], params[:2]]
    )

    def step() -> None:
        last(Slow.apply(first(torch.ones(2, 8)))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return changes(lambda: [step() for _ in range(STEPS)])


@pytest.mark.parametrize("overlap", [False, True])
def test_backward_and_what_it_hides(overlap: bool):
    env = {"HOROVOD_OVERLAP_BACKWARD": str(int(overlap))}
    for numbers in run_ranks(slow_backward, 2, env=env):
        assert numbers["backward_seconds"] >= 0.1 * STEPS
        assert numbers["buckets"] == 2 * STEPS
        assert numbers["step_seconds"] > numbers["backward_seconds"]
        busy = numbers["wait_seconds"] + numbers["reduce_seconds"]
        if overlap:
            assert 0 < numbers["hidden_seconds"] <= busy + 1e-6
        else:
            assert numbers["hidden_seconds"] < busy


def late_backward(rank: int, size: int, folder: Path) -> list[dict[str, Any]]:
    """Rank 1 is late in backward, once rank 0 has ended the step before; what the steps say."""
    hvd.init()
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01))
    for number in range(STEPS):
        loss = net(torch.ones(2, 8)).sum()
        if rank == 0:
            (folder / str(number)).touch()
        else:
            while not (folder / str(number)).exists():
                time.sleep(0.001)  # between looks at the file system
            time.sleep(0.2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [step._asdict() for step in runtime.statistics.recent()]


def test_steps_say_who_is_late():
    def measure() -> list[list[dict[str, Any]]]:
        with tempfile.TemporaryDirectory() as folder:
            return run_ranks(late_backward, 2, Path(folder))

    def check(found: list[list[dict[str, Any]]]) -> None:
        on_time, late = found
        assert [step["number"] for step in on_time] == list(range(1, STEPS + 1))
        for mine, other in zip(on_time[1:], late[1:], strict=True):
            assert mine["seconds"] > 0.19
            assert mine["wait"] <= mine["seconds"]
            assert mine["wait"] + mine["reduce"] - mine["hidden"] <= mine["seconds"] + 1e-6
            assert other["wait"] < other["seconds"]
        assert sum(step["wait"] for step in on_time) > sum(step["wait"] for step in late)

    check_times(measure, check)
