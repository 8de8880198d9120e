"""A small training for the workers of elastic tests, whose outcome does not depend on the ranks.

All ranks compute the same gradient, so after n steps the model is what one process would have.
Workers start from different weights: only the synchronisation can make them equal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import horovod.torch as hvd
from tests.ranks import listen, tell

COMMIT_EVERY = 2
X = torch.arange(12, dtype=torch.float32).reshape(4, 3) / 12
Y = torch.tensor([[1.0], [-1.0], [0.5], [2.0]])


@dataclass
class Plan:
    """What a test wants of the workers."""

    steps: int = 10
    size: int | None = None  # also go on until there are that many ranks
    halt: dict[str, int] = field(default_factory=dict)  # worker -> step after which it stands still
    pause: int | None = None  # step after which all tell the test and listen, once
    checkpoint_dir: str | None = None
    overlap: bool = False  # reduce gradients while backward goes on, whatever the machine


def this_worker() -> str:
    return os.environ.get("HOROVOD_WORKER_ID", "w0")


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = ((model(X) - Y) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()  # after the step: gradients of one that failed must not stay


def expected(steps: int, seed: int = 0) -> list[float]:
    """The weights after `steps`, of a training that began with w0's."""
    model, optimizer = make(seed)
    for _ in range(steps):
        one_step(model, optimizer)
    return weights(model)


def weights(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()


def train(plan: Plan, each_step: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """What a worker runs. Returns how it ended and what it went through."""
    if plan.overlap:
        os.cpu_count = lambda: 64  # type: ignore[assignment]
    hvd.init()
    model, optimizer = make(int(this_worker()[1:]))
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(
        model, wrapped, step=0, checkpoint_dir=plan.checkpoint_dir, paused=False
    )
    history: list[tuple[int, int]] = []  # step, size

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < plan.steps or (plan.size is not None and hvd.size() != plan.size):
            one_step(model, wrapped)
            state.step += 1
            history.append((state.step, hvd.size()))
            if each_step is not None:
                each_step(state)
            if plan.halt.get(this_worker()) == state.step:
                tell("halt")
                signal.pause()
            if plan.pause == state.step and not state.paused:
                state.paused = True
                tell("paused")
                listen()
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    try:
        loop(state)
        ended = "returned"
    except SystemExit as end:
        ended = f"exit {end.code}"
    return {
        "ended": ended,
        "history": history,
        "weights": weights(model),
        "steps": state.step,
        "rank": hvd.rank() if hvd.is_initialized() else None,
        "size": hvd.size() if hvd.is_initialized() else None,
    }
