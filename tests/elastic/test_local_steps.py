"""A worker that is lost between two synchronisations costs its own local steps and no others."""

from __future__ import annotations

import signal
from typing import Any

import torch

import horovod.torch as hvd
from tests.effort import examples
from tests.elastic.job import ElasticJob
from tests.elastic.training import this_worker
from tests.ranks import tell

EVERY = 4  # local steps
STEPS = 12


def _train(options: dict[str, Any]) -> dict[str, Any]:
    """Each worker moves by its own number in every step; w1 stands still after the sixth."""
    hvd.init()
    number = int(this_worker()[1:])
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, float(number))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **options
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    begun: list[tuple[int, float]] = []  # the step and weight with which each generation began
    seen: list[tuple[int, float]] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        begun.append((state.step, model.weight.item()))
        while state.step < STEPS:
            optimizer.zero_grad()
            (model.weight * -(1.0 + number)).sum().backward()
            optimizer.step()
            state.step += 1
            seen.append((state.step, model.weight.item()))
            if this_worker() == "w1" and state.step == 6:
                tell("halt")
                signal.pause()
        optimizer.synchronize_parameters()

    loop(state)
    return {"begun": begun, "seen": seen, "weight": model.weight.item()}


def test_survivors_keep_their_local_steps_and_a_new_worker_begins_at_the_last_synchronisation():
    with ElasticJob(_train, {"local_steps": EVERY}) as job:
        job.start(3)
        assert job.heard(1) == "halt"
        job.kill(1)
        job.lose(1)
        job.start(1, kind="added")
        outcomes = job.wait(ranks=[0, 2, 3])
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
    w0, w2, w3 = (outcome.result for outcome in outcomes)
    anchor = 0.0 + EVERY * (1 + 2 + 3) / 3  # after four steps, from w0's weight
    assert (4, anchor) in w0["seen"]
    assert w3["begun"][0][1] == anchor
    for result, speed in ((w0, 1.0), (w2, 3.0)):
        # The eighth step was taken, and the synchronisation after it failed.
        assert result["begun"][-1] == (7, anchor + 4 * speed)
        assert [step for step, _ in result["seen"]] == [*range(1, 8), *range(8, STEPS + 1)]
    assert w0["weight"] == w2["weight"] == w3["weight"]


def _train_under_fire(last: int) -> dict[str, Any]:
    """Train with workers that come and stand still, up to number `last`, which stays."""
    hvd.init()
    number = int(this_worker()[1:])
    torch.manual_seed(number)
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01),
        model.named_parameters(),
        local_steps=EVERY,
        outer=hvd.OuterSGD(),
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    seen: list[int] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        # A worker that stands still holds the others up before they have taken EVERY + 1 steps.
        while state.step < (EVERY + 1) * (last + 1):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            state.step += 1
            seen.append(state.step)
            if 3 <= number < last and len(seen) == 2:
                tell("halt")  # between two synchronisations
                signal.pause()
        optimizer.synchronize_parameters()

    loop(state)
    weights = torch.cat([param.detach().view(-1) for param in model.parameters()])
    return {"seen": seen, "weights": weights.tolist()}


def test_one_of_four_is_killed_again_and_again():
    """20 times in a long run: the others lose no step, and all end with the same model."""
    last = 3 + examples(20)
    with ElasticJob(_train_under_fire, last) as job:
        job.start(4)
        for victim in range(3, last):
            assert job.heard(victim) == "halt"
            job.kill(victim)
            job.lose(victim)
            job.start(1, kind="added")
        outcomes = job.wait(ranks=[0, 1, 2, last])
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
    results = [outcome.result for outcome in outcomes]
    for result in results[:3]:
        assert result["seen"] == list(range(1, (EVERY + 1) * (last + 1) + 1))
    assert all(result["weights"] == results[0]["weights"] for result in results)
