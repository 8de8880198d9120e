"""Show what each process does in TensorBoard: loss, steps per second, shares of waiting.

    horovodrun -np 2 python examples/pytorch/pytorch_stats_tensorboard.py
    python examples/pytorch/pytorch_stats_tensorboard.py

Then look at it with `tensorboard --logdir runs`. Every process writes a run of its own, so that the
charts show all of them in one: who is slow, and who waits. Needs `pip install tensorboard`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import horovod.torch as hvd

# What of hvd.stats() to show: the running totals as shares of the time since the last look, ...
SHARES = {"wait_seconds": "share of waiting", "reduce_seconds": "share of reducing"}
# ... and what is of interest as it is.
VALUES = ("steps_per_second", "memory_bytes", "gpu_memory_bytes", "negotiation_misses")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of one process")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--logdir", type=Path, default=Path("runs"))
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


def changes(before: dict, after: dict) -> dict[str, float]:
    """What the time between two calls of hvd.stats() was spent on, and the rest as it is."""
    seconds = max(after["step_seconds"] - before["step_seconds"], 1e-9)
    found = {name: (after[key] - before[key]) / seconds for key, name in SHARES.items()}
    return found | {key: after[key] for key in VALUES}


def main() -> None:
    args = parse_arguments()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        sys.exit("this example needs TensorBoard: pip install tensorboard")
    hvd.init()
    torch.manual_seed(42)
    device = choose_device(args.no_cuda)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).flatten(1).to(device)
    labels = torch.tensor(digits.target).to(device)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=args.lr),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    writer = SummaryWriter(args.logdir / f"rank{hvd.rank()}")
    before = hvd.stats()
    for epoch in range(args.epochs):
        for group in optimizer.param_groups:  # Horovod: grows to the rate of all processes
            group["lr"] = args.lr * min(epoch + 1, hvd.size())
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for part in order[hvd.rank() :: hvd.size()].split(args.batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[part]), labels[part])
            loss.backward()
            optimizer.step()
        hvd.stats.log(loss=loss)  # for `horovodrun --dashboard`
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        after = hvd.stats()
        numbers = {"loss": mean, **changes(before, after)}
        before = after
        for name, value in numbers.items():
            writer.add_scalar(name.replace(" ", "_"), value, after["steps"])
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f}", flush=True)
    writer.close()


if __name__ == "__main__":
    main()
