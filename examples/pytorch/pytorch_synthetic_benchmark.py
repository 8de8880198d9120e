"""Measure how many images a second a ResNet trains on, with made-up data that costs nothing.

    horovodrun -np 2 python examples/pytorch/pytorch_synthetic_benchmark.py
    horovodrun -np 2 python examples/pytorch/pytorch_synthetic_benchmark.py \
        --model resnet18 --batch-size 4 --image-size 64 --num-iters 3

The speed of one process alone is that of the same command without horovodrun; the total of N
processes over N times that is the scaling efficiency.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from resnet import DEPTHS, resnet
from tqdm import tqdm

import horovod.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = [f"resnet{depth}" for depth in DEPTHS]
    parser.add_argument("--model", choices=models, default="resnet50")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="measured together")
    parser.add_argument("--num-iters", type=int, default=10, help="number of measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="16 bits on the wire")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps with Adasum")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def choose_device(cpu_only: bool) -> torch.device:
    """This process's own GPU if there is one, by local rank; else its share of the cores."""
    kind = None if cpu_only else torch.accelerator.current_accelerator(check_available=True)
    if kind is not None:
        index = hvd.local_rank() % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        return torch.device(kind.type, index)
    if "OMP_NUM_THREADS" not in os.environ:  # horovodrun and torchrun set it
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    return torch.device("cpu")


def shows_progress() -> bool:
    """Only rank 0 draws a bar, and only where somebody watches.

    Under horovodrun a process writes to a pipe; the launcher says whether a terminal is behind.
    """
    watched = sys.stderr.isatty() or os.environ.get("HOROVOD_LAUNCHER_TTY") == "1"
    return hvd.rank() == 0 and watched


def make_step(args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """A training step on one batch that stays on the device."""
    model = resnet(int(args.model.removeprefix("resnet"))).to(device)
    factor = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * factor)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def measure(step: Callable[[], None], num_steps: int, device: torch.device) -> float:
    """Seconds that `num_steps` steps take on this process."""
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(hvd.rank())
    device = choose_device(args.no_cuda)
    say = print if hvd.rank() == 0 else lambda *_, **__: None
    unit = "CPU" if device.type == "cpu" else "GPU"

    say(f"Model: {args.model}")
    say(f"Batch size: {args.batch_size}")
    say(f"Number of {unit}s: {hvd.size()}", flush=True)
    step = make_step(args, device)
    measure(step, args.num_warmup_batches, device)
    rates = []
    for iteration in tqdm(
        range(args.num_iters), disable=not shows_progress(), leave=False, ncols=80
    ):
        seconds = measure(step, args.num_batches_per_iter, device)
        mine = torch.tensor(args.batch_size * args.num_batches_per_iter / seconds)
        rates.append(hvd.allreduce(mine, name="rate").item())  # averaged over the processes
        if not shows_progress():
            say(f"Iteration {iteration + 1}: {rates[-1]:.1f} img/sec per {unit}", flush=True)

    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    say(f"Img/sec per {unit}: {mean:.1f} +-{spread:.1f}")
    say(
        f"Total img/sec on {hvd.size()} {unit}(s): {hvd.size() * mean:.1f} "
        f"+-{hvd.size() * spread:.1f}"
    )


if __name__ == "__main__":
    main()
