"""A real elastic training in small, whose ranks a test makes slow, stops and kills.

Run by horovodrun with a folder as its argument: the file ``slow`` there holds the seconds by which
rank 1 is late in backward, ``end`` ends the training; every worker leaves its process id.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import horovod.torch as hvd

FOLDER = Path(sys.argv[1])


class Slow(torch.autograd.Function):
    """Takes its time in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        try:
            seconds = float((FOLDER / "slow").read_text() or 0)
        except OSError:
            seconds = 0.0
        time.sleep(0.02 + (seconds if hvd.rank() == 1 else 0.0))
        return gradient


class Delay(torch.nn.Module):
    """Between two layers, so that the gradient of one is there before, and of the other after."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return Slow.apply(tensor)


hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 8), Delay(), torch.nn.Linear(8, 2))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
state = hvd.elastic.TorchState(model, optimizer, batch=0)


@hvd.elastic.run
def train(state: Any) -> None:
    pids = FOLDER / f"rank{hvd.rank()}.pid"
    pids.with_suffix(".new").write_text(str(os.getpid()))
    os.replace(pids.with_suffix(".new"), pids)
    ended = torch.zeros(1)
    while not ended.item():
        inputs = torch.randn(32, 16)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
        loss.backward()
        optimizer.step()
        hvd.stats.log(loss=loss.item())
        state.batch += 1
        state.commit()
        if state.batch % 20 == 0:
            print(f"batch {state.batch}: <i>loss</i> {loss.item():.3f}", flush=True)
            here = torch.tensor([float((FOLDER / "end").exists())])
            ended = hvd.allreduce(here, op=hvd.Max, name="ended")


train(state)
