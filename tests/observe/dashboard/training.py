"""A function for the ranks of any launcher, and what a saved page tells about it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def train(steps: int = 5) -> int:
    """A few real steps; the last report is sent by ``shutdown``."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        hvd.stats.log(loss=0.5)
    rank = int(hvd.rank())
    hvd.shutdown()
    return rank


def saved(path: Path) -> dict[str, Any]:
    """What a saved page has inside."""
    found = re.search(r'id="saved">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def check(path: Path, size: int, steps: int = 5) -> dict[str, Any]:
    """The board of a job that has trained: all ranks reported, and their loss is there."""
    board: dict[str, Any] = saved(path)["board"]
    assert [rank["step"] for rank in board["ranks"]] == [steps] * size
    assert {rank["state"] for rank in board["ranks"]} == {"ended"}
    assert len(board["metrics"]["loss"]["points"]) == steps
    assert board["steps"]["rows"]
    return board
