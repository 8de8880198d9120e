"""One rank of benchmarks/compile.py: trains one model with one library, compiled and not.

Started by `benchmarks.compile` with a plan in JSON as the only argument. An order names a section:
"turn" takes a turn of one contender, "operator" one of an allreduce of 4 bytes, and "graphs" counts
what torch.compile makes of a step.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd
from benchmarks.processes import Member
from benchmarks.training_models import WORKLOADS, Batch, Workload
from benchmarks.training_rank import batches, finish, narrow

WARM_UP = 10
CALLS = 100  # allreduces in a function, so that calling the function costs little beside them

Step = Callable[[Batch], torch.Tensor]

# An operator with the arguments of an allreduce that does nothing: what torch itself costs.
ORDER = torch.zeros(0)
LIBRARY = torch.library.Library("benchmark", "DEF")
LIBRARY.define(
    "nothing_(Tensor(a!)[] tensors, Tensor(b!) order, str? name, int op, float prescale_factor,"
    " float postscale_factor, int process_set) -> ()"
)
LIBRARY.impl("nothing_", lambda *arguments: None, "CompositeExplicitAutograd")
torch.library.register_fake("benchmark::nothing_", lambda *arguments: None, lib=LIBRARY)


def train(library: str, workload: Workload, device: torch.device) -> tuple[nn.Module, Any, Step]:
    """Return a model, its optimizer and one step of training, by ours, ddp or plain torch."""
    torch.manual_seed(1)
    model = workload.model().to(device)
    trained: nn.Module = model
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if library == "ddp":
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif library == "ours":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step(batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        with narrow(device):
            loss = F.cross_entropy(trained(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained, optimizer, step


def contender(name: str, workload: Workload, device: torch.device, compiled: str) -> Step:
    """Return the step of a contender such as "ours" or "ddp eager"."""
    library, _, is_eager = name.partition(" ")
    trained, _, step = train(library, workload, device)
    if is_eager:
        return step
    if compiled == "model":
        trained.compile()
        return step
    return torch.compile(step)


def reduce_in_place(tensor: torch.Tensor) -> torch.Tensor:
    for number in range(CALLS):
        hvd.allreduce_(tensor, name=f"in place {number}", op=hvd.Max)
    return tensor


def reduce_into_new(tensor: torch.Tensor) -> torch.Tensor:
    for number in range(CALLS):
        tensor = hvd.allreduce(tensor, name=f"new {number}", op=hvd.Max)
    return tensor


def call_nothing(tensor: torch.Tensor) -> torch.Tensor:
    for number in range(CALLS):
        torch.ops.benchmark.nothing_([tensor], ORDER, f"nothing {number}", 0, 1.0, 1.0, 0)
    return tensor


def touch(tensor: torch.Tensor) -> torch.Tensor:
    """Do next to nothing: what is measured is how torch enters a compiled function."""
    return tensor.add_(0)


# -- what torch.compile makes of a step ---------------------------------------------------------


def count_graphs(library: str, workload: Workload, batch: Batch, how: str) -> list[int]:
    """Return how many graphs and graph breaks there are, of three steps, by torch's counters.

    Where `torch._dynamo.explain` can say it, of the model and of the step, it counts instead.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trained, optimizer, step = train(library, workload, batch[0].device)
    if how in ("model", "step"):
        explained = torch._dynamo.explain(trained if how == "model" else step)
        told = explained(batch[0] if how == "model" else batch)
        return [told.graph_count, told.graph_break_count]
    if how == "optimizer":
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    elif how == "reduce-overhead":
        step(batch)  # momenta that a CUDA graph has made are overwritten by its next replay
        step = torch.compile(step, mode="reduce-overhead")
    else:
        step = torch.compile(step, backend="aot_eager")  # as many graphs, in less time
    with torch._dynamo.config.patch(compiled_autograd=how == "compiled autograd"):
        for _ in range(3):
            step(batch)
    counters = torch._dynamo.utils.counters
    return [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]


# -- turns --------------------------------------------------------------------------------------


def timed(
    start: float, repeated: Callable[[], Any], times: int, device: torch.device
) -> tuple[float, float]:
    """Return the milliseconds of one call, and those of processors, of all threads, in it.

    Time counts from the moment at which all ranks begin.
    """
    while time.monotonic() < start:
        pass
    used = time.process_time()
    for _ in range(times):
        repeated()
    finish(device)
    elapsed, used = time.monotonic() - start, time.process_time() - used
    return 1000 * elapsed / times, 1000 * used / times


def main(plan: dict[str, Any]) -> None:
    member = Member()
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    device = torch.device(plan["device"])
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    library = plan["library"]
    if library == "ours":
        hvd.init()
    elif library == "ddp":
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, rank=rank, world_size=size)
    workload = WORKLOADS[plan["model"]]
    data = batches(workload, device)
    steps = {
        name: contender(name, workload, device, plan["compiled"]) for name in plan["contenders"]
    }
    for step in steps.values():
        for number in range(WARM_UP):
            step(data[number % len(data)])
    tensor = torch.ones(1, device=device)
    reductions = {"in place eager": reduce_in_place, "new eager": reduce_into_new}
    if plan["operator"]:
        reductions["entry"] = torch.compile(touch, fullgraph=True)
        reductions["nothing"] = torch.compile(call_nothing, fullgraph=True)
        reductions["in place"] = torch.compile(reduce_in_place, fullgraph=True)
        reductions["new"] = torch.compile(reduce_into_new, fullgraph=True)
        for reduction in reductions.values():
            for _ in range(3):
                reduction(tensor)
    finish(device)
    gc.collect()
    gc.disable()

    def obey(order: dict[str, Any]) -> Any:
        if order["section"] == "graphs":
            return count_graphs(order["library"], workload, data[0], order["how"])
        if order["section"] == "operator":
            reduction = reductions[order["name"]]
            calls = 1 if order["name"] == "entry" else CALLS
            both = timed(order["start"], lambda: reduction(tensor), 5, device)
            return [1000 * value / calls for value in both]
        step, number = steps[order["name"]], iter(range(workload.turn))
        return timed(
            order["start"],
            lambda: step(data[next(number) % len(data)]),
            workload.turn,
            device,
        )

    member.obey(obey)
    if library == "ours":
        hvd.shutdown()
    elif library == "ddp":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    main(json.loads(sys.argv[1]))
