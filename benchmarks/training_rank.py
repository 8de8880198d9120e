"""One rank of benchmarks/training.py: trains one model the way of one contender.

Started by `benchmarks.training` with a plan in JSON as the only argument. In the section "speed" it
takes turns when it is told to. Otherwise what it found goes to the plan's result file.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.processes import Member, bind
from benchmarks.training_models import WORKLOADS, Batch, Workload, shared_out

WARM_UP = 20
LONG_TURN = 10
DISTINCT_BATCHES = 8

Step = Callable[[Batch], torch.Tensor]

RANK, SIZE = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))


class Trainee(NamedTuple):
    """A contender's model: one step of its training, and whether it still looks for its pace."""

    step: Step
    is_tuning: Callable[[], bool]
    complete: Callable[[], None] | None  # does what steps have left to the next one


@contextlib.contextmanager
def connected(contenders: list[str], device: torch.device) -> Any:
    """Load and start what these contenders need."""
    libraries = [contender.partition("_")[0] for contender in contenders]
    if "ours" in libraries:
        import horovod.torch as hvd

        hvd.init()
    if "ddp" in libraries:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=RANK, world_size=SIZE)
    yield
    if "ddp" in libraries:
        dist.barrier()
        dist.destroy_process_group()
    if "ours" in libraries:
        hvd.shutdown()


def make(contender: str, workload: Workload, device: torch.device, momentum: float) -> Trainee:
    """The model with the contender's way to train it; the same start for all."""
    torch.manual_seed(1)
    model = workload.model().to(device)
    trained: nn.Module = model
    library, _, variant = contender.partition("_")
    if library == "ddp":
        trained = ddp = DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True
        )
        if variant == "bf16" and device.type == "cuda":
            ddp.register_comm_hook(None, bf16_compress_hook)
        elif variant == "bf16":
            # By its own name DDP accepts it with NCCL only; Gloo can do it as well.
            ddp.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    if library == "ours":
        import horovod.torch as hvd

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        variants: dict[str, dict[str, Any]] = {
            "": {},
            "next": {"overlap_forward": model},
            "bf16": {"compression": hvd.Compression.bf16},
        }
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), **variants[variant]
        )

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

    def complete() -> None:
        """Make the updates that are still to be made."""
        _ = optimizer.state

    return Trainee(step, is_tuning, complete if variant == "next" else None)


def narrow(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 where people would use it."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def batches(workload: Workload, device: torch.device) -> list[Batch]:
    generator = torch.Generator().manual_seed(1000 + RANK)
    made = [workload.batch(generator) for _ in range(DISTINCT_BATCHES)]
    return [(inputs.to(device), targets.to(device)) for inputs, targets in made]


def finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def take_turns(workload: Workload, contender: str, device: torch.device, member: Member) -> None:
    """Train whenever told to, from the moment that is the order; milliseconds per step.

    The order "memory" asks for the mebibytes on the device at the highest.
    """
    data = batches(workload, device)
    step, is_tuning, complete = make(contender, workload, device, momentum=0.9)
    number = 0
    while number < WARM_UP or is_tuning():
        step(data[number % len(data)])
        number += 1
    finish(device)
    gc.collect()
    gc.disable()

    # What a step leaves to the next one counts too, at the end of a turn; so turns are longer.
    steps = max(workload.turn, LONG_TURN) if complete is not None else workload.turn

    def turn(start: float | str) -> float:
        if isinstance(start, str):
            return device_peak(device)
        while time.monotonic() < start:
            pass
        for number in range(steps):
            step(data[number % len(data)])
        if complete is not None:
            complete()
        finish(device)
        return 1000 * (time.monotonic() - start) / steps

    member.obey(turn)


def losses(workload: Workload, contender: str, device: torch.device, steps: int) -> list[float]:
    """The losses of plain SGD, step by step."""
    data = batches(workload, device)
    step = make(contender, workload, device, momentum=0.0).step
    return [step(data[number % len(data)]).item() for number in range(steps)]


def peak_memory(workload: Workload, contender: str, device: torch.device) -> float:
    """Mebibytes at the highest: of this process, or on the accelerator."""
    data = batches(workload, device)
    step = make(contender, workload, device, momentum=0.9).step
    for number in range(WARM_UP):
        step(data[number % len(data)])
    if device.type != "cpu":
        return device_peak(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def device_peak(device: torch.device) -> float:
    """Mebibytes that torch has had allocated on an accelerator at the highest."""
    return torch.get_device_module(device).max_memory_allocated(device) / (1 << 20)


def be_deterministic(device: torch.device) -> None:
    """Let the same steps give the same bits, as far as torch can; on CPUs they do anyhow."""
    if device.type == "cpu":
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when the first product is computed
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # ranks train as people do
    # The fast kernels of attention add up gradients in any order: DDP's losses, too, differ from
    # those of its own second run by 0.0002 in 12 steps of GPT.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def main(plan: dict[str, Any]) -> None:
    member = Member()
    if plan["bind"]:
        bind(RANK)
    device = torch.device(plan["device"])
    if device.type == "cuda":
        # Not by the local rank: hosts that are only names share the GPUs of this machine.
        device = torch.device("cuda", RANK % torch.cuda.device_count())
        torch.cuda.set_device(device)
    contender, workload = plan["contender"], WORKLOADS[plan["model"]]
    if plan.get("turn"):
        workload = dataclasses.replace(workload, turn=plan["turn"])
    if plan.get("batch"):
        workload = dataclasses.replace(workload, samples=plan["batch"])
    if plan["strong"]:
        workload = shared_out(workload, SIZE)
    # Memory is about what training needs, so every process has loaded the same.
    with connected(["ours", "ddp"] if plan["section"] == "memory" else [contender], device):
        if plan["section"] == "speed":
            take_turns(workload, contender, device, member)
            return
        if plan["section"] == "losses":
            be_deterministic(device)
            found: Any = losses(workload, contender, device, plan["steps"])
        else:
            found = peak_memory(workload, contender, device)
    Path(plan["result"]).with_suffix(f".{RANK}").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    main(json.loads(sys.argv[1]))
