"""What the processes of benchmarks/ray.py do, under Ray and under horovodrun.

As a program, ``python -m benchmarks.ray_rank STEPS``, it trains and rank 0 prints the milliseconds
of a step; horovodrun starts it so.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

WARM_UP = 20


def first_allreduce() -> float:
    """When an allreduce with Horovod was finished here."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(4))
    return time.time()


def first_torch_allreduce(config: dict[str, Any]) -> None:
    """The same in Ray Train's TorchTrainer, whose process group is there already."""
    import ray.train
    import torch

    torch.distributed.all_reduce(torch.ones(4))
    finished = time.time()
    rank = ray.train.get_context().get_world_rank()
    with open(os.path.join(config["folder"], f"{rank}"), "w") as file:
        file.write(str(finished))


def train(steps: int) -> float:
    """Milliseconds of a step of the MLP, the median of `steps`."""
    import torch
    from torch.nn import functional as F

    import horovod.torch as hvd
    from benchmarks.training_models import WORKLOADS

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = WORKLOADS["mlp"]
    model = workload.model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    inputs, targets = workload.batch(torch.Generator().manual_seed(hvd.rank()))
    times = []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        times.append(1000 * (time.perf_counter() - begin))
    hvd.shutdown()
    return statistics.median(times[WARM_UP:])


def train_elastic(kills: int) -> None:
    """Train until as many workers have been killed and replaced, reporting every step."""
    import torch

    import horovod.torch as hvd
    from horovod.ray import ray_logger

    hvd.init()
    model = torch.nn.Linear(64, 64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sizes=())

    @hvd.elastic.run
    def run(state: Any) -> None:
        while len(state.sizes) < 2 * kills + 1:
            optimizer.zero_grad()
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            if not state.sizes or state.sizes[-1] != hvd.size():
                state.sizes = (*state.sizes, hvd.size())
            message = {"pid": os.getpid(), "size": hvd.size(), "time": time.time()}
            ray_logger.log({**message, "changes": len(state.sizes)})
            time.sleep(0.02)
            state.commit()

    run(state)


def main(report: Callable[[str], None] = print) -> None:
    milliseconds = train(int(sys.argv[1]))
    if os.environ["HOROVOD_RANK"] == "0":
        report(f"ms {milliseconds}")


if __name__ == "__main__":
    main()
