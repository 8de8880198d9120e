"""A worker of elastic jobs on GPUs: every step adds 1 to each weight, whatever ranks there are.

    python -m tests.gpu.elastic_worker FILE SIZE

It trains until the file is there and the job has that many ranks. A step's number is then what its
weights are, or a step was lost or counted twice.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import horovod.torch as hvd
from tests.accelerators import nccl_environment, own_device

ME = os.environ["HOROVOD_WORKER_ID"]
COMMIT_EVERY = 2
TELL_EVERY = 10


class Counting(nn.Module):
    """Weights whose gradient is always -1."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(100_000) for _ in range(8))

    def forward(self) -> torch.Tensor:
        return -sum(weight.sum() for weight in self.weights)


def say(text: str) -> None:
    print(f"{text} worker {ME} rank {hvd.rank()} size {hvd.size()}", flush=True)


def main(file: str, size: int) -> None:
    number = int(ME[1:])  # ranks change when others are lost; devices stay
    os.environ.update(nccl_environment(size)(number))
    device = own_device(number)
    hvd.init()
    model = Counting().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    def is_over() -> bool:
        """What one rank has seen all must have seen."""
        mine = os.path.exists(file) and hvd.size() == size
        flag = torch.tensor([int(mine)], device=device)
        return bool(hvd.allreduce(flag, op=hvd.Min, name="is over"))

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while not is_over():
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            if state.step % TELL_EVERY == 0:
                say(f"step {state.step}")
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(state)
    values = {float(each) for weight in model.weights for each in (weight.min(), weight.max())}
    assert len(values) == 1, values
    say(f"end {state.step} {values.pop():.0f}")
    print(f"pid {os.getpid()} of {ME}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
