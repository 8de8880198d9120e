"""A rank of benchmarks/stats.py: the same work with and without counting, in turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import horovod.torch as hvd
from benchmarks.training_models import WORKLOADS
from horovod.engine.runtime import runtime
from horovod.observe.statistics.counters import Counters
from horovod.observe.statistics.process import Statistics

CALLS = 100  # of an allreduce in a turn


class Switch:
    """Turns counting on and off in a job that goes on."""

    def __init__(self) -> None:
        self._observer = runtime.channel(0).observer
        self._counters = self._observer.counters

    def turn(self, on: bool) -> None:
        runtime.statistics.enabled = on
        self._observer.counters = self._counters if on else None


def training(name: str) -> tuple[Callable[[], None], int]:
    """A step, and how many make a turn."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model = workload.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    inputs, targets = workload.batch(torch.Generator().manual_seed(hvd.rank()))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step, workload.turn


def allreduce() -> tuple[Callable[[], None], int]:
    tensor = torch.ones(256)

    def call() -> None:
        hvd.allreduce_(tensor, name="1 KiB", op=hvd.Max)

    return call, CALLS


def measure(step: Callable[[], None], turn: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of one step, turn by turn, of the slowest rank."""
    switch, samples = Switch(), {"on": [], "off": []}  # type: ignore[var-annotated]
    # A rank that waits for nobody needs no other clock than that of its own work.
    clock = time.thread_time if hvd.size() == 1 else time.perf_counter
    for _ in range(3 * turn + 20):  # until buckets are cut and memory is there
        step()
    order, deadline = ["on", "off"], time.monotonic() + seconds
    while True:
        for name in order:
            switch.turn(name == "on")
            step()
            hvd.barrier()
            began = clock()
            for _ in range(turn):
                step()
            samples[name].append((clock() - began) / turn)
        order.reverse()
        switch.turn(True)
        over = torch.tensor([time.monotonic() > deadline])
        if hvd.allreduce(over, op=hvd.Max, name="over").item():
            break
    everybody: list[dict[str, list[float]]] = hvd.allgather_object(samples)
    return {
        name: [max(turns) for turns in zip(*(s[name] for s in everybody), strict=True)]
        for name in samples
    }


def cost_alone() -> dict[str, float]:
    """Seconds that counting takes for an operation and for a step, with nothing around it."""
    statistics, counters, repeats = Statistics(), Counters(("shared_memory",)), 20_000
    statistics._counters.append(counters)
    began = time.thread_time()
    for _ in range(repeats):
        pass
    empty = time.thread_time() - began
    began = time.thread_time()
    for _ in range(repeats):
        met = time.monotonic()
        counters.reduce += time.monotonic() - met
        counters.wait += met - began
        counters.operations += 1
        counters.bytes_inline += 1024
    operation = time.thread_time() - began - empty
    began = time.thread_time()
    for _ in range(repeats):
        statistics.add_backward(0.001, 1)
        statistics.end_step()
    step = time.thread_time() - began - empty
    return {"operation": operation / repeats, "step": step / repeats}


def main() -> None:
    seconds, names = float(sys.argv[1]), sys.argv[2:]
    hvd.init()
    found: dict[str, Any] = {"alone": cost_alone()}
    for name in names:
        work = allreduce() if name == "allreduce" else training(name)
        found[name] = measure(*work, seconds)
    if hvd.rank() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
