"""One rank of benchmarks/training.py: trains every contender in this process.

Started by `benchmarks.training` with a plan in JSON as the only argument. Rank 0 prints a line per
finished model for the progress bar and leaves what all ranks measured in the plan's result file.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd
from benchmarks.training_models import WORKLOADS, Batch, Workload, shared_out

WARM_UP = 5
DISTINCT_BATCHES = 8
ROUNDS = (5, 200)

Step = Callable[[Batch], torch.Tensor]


class Trainee(NamedTuple):
    """A contender's model: one step of its training, and whether it still looks for its pace."""

    step: Step
    is_tuning: Callable[[], bool]


def make(contender: str, workload: Workload, device: torch.device, momentum: float) -> Trainee:
    """A model of its own with the contender's way to train it; the same start for all."""
    torch.manual_seed(1)
    model = workload.model().to(device)
    trained: nn.Module = model
    if contender == "ddp":
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    if contender == "ours":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step(batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        with narrow(device):
            loss = F.cross_entropy(trained(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def is_tuning() -> bool:
        reducer = getattr(optimizer, "_reducer", None)
        return reducer is not None and reducer.is_tuning()

    return Trainee(step, is_tuning)


def narrow(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 where people would use it."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def batches(workload: Workload, device: torch.device) -> list[Batch]:
    generator = torch.Generator().manual_seed(1000 + hvd.rank())
    made = [workload.batch(generator) for _ in range(DISTINCT_BATCHES)]
    return [(inputs.to(device), targets.to(device)) for inputs, targets in made]


def finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def race(
    workload: Workload, contenders: list[str], device: torch.device, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds per step of each contender: one sample a turn, that of the slowest rank."""
    data = batches(workload, device)
    trainees = {name: make(name, workload, device, momentum=0.9) for name in contenders}
    for step, is_tuning in trainees.values():
        number = 0
        while number < WARM_UP or is_tuning():
            step(data[number % len(data)])
            number += 1
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    began = time.perf_counter()
    gc.collect()
    gc.disable()
    for turn in range(ROUNDS[1]):
        for name in order:
            step = trainees[name].step
            finish(device)
            dist.barrier()
            start = time.perf_counter()
            for number in range(workload.turn):
                step(data[number % len(data)])
            finish(device)
            samples[name].append(1000 * (time.perf_counter() - start) / workload.turn)
        order.append(order.pop(0))
        enough = turn + 1 >= ROUNDS[0] and time.perf_counter() - began > seconds
        if agreed(enough):
            break
    gc.enable()
    everyone = hvd.allgather_object(samples)
    return {
        name: [max(turn) for turn in zip(*(one[name] for one in everyone), strict=True)]
        for name in contenders
    }


def agreed(enough: bool) -> bool:
    """Rank 0's word: all ranks must stop after the same turn."""
    word = torch.tensor([int(enough)])
    dist.broadcast(word, 0)
    return bool(word.item())


def losses(workload: Workload, contender: str, device: torch.device, steps: int) -> list[float]:
    """The losses of plain SGD, step by step."""
    data = batches(workload, device)
    step = make(contender, workload, device, momentum=0.0).step
    return [step(data[number % len(data)]).item() for number in range(steps)]


def peak_memory(workload: Workload, contender: str, device: torch.device) -> float:
    """Mebibytes at the highest: of this process, or on the accelerator."""
    data = batches(workload, device)
    step = make(contender, workload, device, momentum=0.9).step
    for number in range(2 * WARM_UP):
        step(data[number % len(data)])
    if device.type != "cpu":
        return torch.cuda.max_memory_allocated(device) / (1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(plan: dict[str, Any]) -> None:
    if plan["bind"]:  # before there are any threads, which would not be bound
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    hvd.init()
    device = torch.device(plan["device"])
    if device.type == "cuda":
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=hvd.rank(), world_size=hvd.size())
    found: dict[str, Any] = {}
    for name in plan["models"]:
        workload = WORKLOADS[name]
        if plan["strong"]:
            workload = shared_out(workload, hvd.size())
        if plan["section"] == "speed":
            found[name] = race(workload, plan["contenders"], device, plan["seconds"])
        elif plan["section"] == "losses":
            found[name] = {
                one: hvd.allgather_object(losses(workload, one, device, plan["steps"]))
                for one in plan["contenders"]
            }
        else:
            (contender,) = plan["contenders"]
            found[name] = hvd.allgather_object(peak_memory(workload, contender, device))
        if hvd.rank() == 0:
            print(f"done {name}", flush=True)
    if hvd.rank() == 0:
        Path(plan["result"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    main(json.loads(sys.argv[1]))
