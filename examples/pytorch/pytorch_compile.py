"""Train a model whose whole step is compiled: forward, loss, and the optimizer's update.

    horovodrun -np 2 python examples/pytorch/pytorch_compile.py

The compiler leaves alone what talks to the other processes, which happens between the gradients
and the update. `--compile model` compiles the model only, `--compile nothing` shows what it gains.
The data are the 1,797 handwritten digits that come with scikit-learn. Lines that a single-process
script would not have are marked "Horovod".
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import horovod.torch as hvd

Step = Callable[[Tensor, Tensor], Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", choices=["step", "model", "nothing"], default="step")
    parser.add_argument(
        "--backend", help="of torch.compile; default: inductor, or aot_eager without a C++ compiler"
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one process")
    parser.add_argument(
        "--warmup-epochs", type=int, default=2, help="epochs until it is that of all processes"
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/compile.pt"))
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, one row of 64 numbers each, with their labels."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, torch.tensor(digits.target), test_size=0.2, random_state=0, stratify=digits.target
    )
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, width), nn.LayerNorm(width), nn.GELU()),
        *(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()),
        nn.Linear(width, 10),
    )


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


def choose_backend(wanted: str | None, device: torch.device) -> str:
    """Inductor writes C++ for CPUs, which somebody must compile."""
    has_compiler = any(map(shutil.which, ("g++", "clang++", os.environ.get("CXX", "c++"))))
    return wanted or ("inductor" if has_compiler or device.type != "cpu" else "aot_eager")


def shows_progress() -> bool:
    """Only rank 0 draws a bar, and only where somebody watches.

    Under horovodrun a process writes to a pipe; the launcher says whether a terminal is behind.
    """
    watched = sys.stderr.isatty() or os.environ.get("HOROVOD_LAUNCHER_TTY") == "1"
    return hvd.rank() == 0 and watched


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, what: str, backend: str
) -> tuple[nn.Module, Step]:
    """The model to use, and a function that learns from a batch and returns its loss."""
    used = torch.compile(model, backend=backend) if what == "model" else model

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(used(images), labels)
        loss.backward()
        optimizer.step()  # Horovod: averages the gradients first; also in compiled code
        return loss.detach()

    return used, torch.compile(step, backend=backend) if what == "step" else step


def learning_rate(args: argparse.Namespace, epoch: float) -> float:
    """Horovod: grows from the rate of one process to that of all of them.

    A large rate from the start would throw the untrained model off.
    """
    progress = min(1.0, epoch / args.warmup_epochs) if args.warmup_epochs else 1.0
    return args.lr * (1 + (hvd.size() - 1) * progress)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of images the model gets right; every process looks at its part of them."""
    images, labels = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in data.tensors)
    correct = (model(images).argmax(1) == labels).sum()
    return hvd.allreduce(correct, name="correct", op=hvd.Sum).item() / len(data)


def main() -> None:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    torch.manual_seed(args.seed)
    device = choose_device(args.no_cuda)  # Horovod: one GPU for each process
    say = print if hvd.rank() == 0 else lambda *_, **__: None

    train_data, test_data = load_data()
    # Horovod: every process sees its own part of the training data.
    sampler = DistributedSampler(
        train_data, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
    )
    # A smaller batch at the end would be compiled once more.
    loader = DataLoader(train_data, args.batch_size, sampler=sampler, drop_last=True)
    model = make_model(args.width).to(device)
    # The rate is a tensor: a number would be a part of the compiled code, which is made again
    # when it changes.
    rate = torch.tensor(args.lr, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    # Horovod: all start from what rank 0 has.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # Horovod: average the gradients over all processes before every step.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    backend = choose_backend(args.backend, device)
    used, step = make_step(model, optimizer, args.compile, backend)
    how = "" if args.compile == "nothing" else f" by {backend}"
    say(f"{hvd.size()} process(es) on {device.type}, compiled{how}: {args.compile}", flush=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # Horovod: shuffle anew, alike on all processes
        started, total = time.monotonic(), torch.zeros((), device=device)
        bar = tqdm(
            loader,
            desc=f"epoch {epoch + 1}/{args.epochs}",
            disable=not shows_progress(),
            leave=False,
            ncols=80,
        )
        for number, (images, labels) in enumerate(bar):
            for group in optimizer.param_groups:
                group["lr"].fill_(learning_rate(args, epoch + number / len(loader)))
            total += step(images.to(device), labels.to(device))
        loss = hvd.allreduce(total / len(loader), name="loss").item()
        seconds = time.monotonic() - started
        share = accuracy(used, test_data, device)
        hvd.stats.log(loss=loss, accuracy=share)  # for `horovodrun --dashboard`
        say(
            f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {share:.2%}, "
            f"{1000 * seconds / len(loader):.2f} ms a step"
            + (", with compiling" if epoch == 0 and args.compile != "nothing" else ""),
            flush=True,
        )
    if hvd.rank() == 0:  # Horovod: all have the same model, one writes it
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), args.checkpoint)


if __name__ == "__main__":
    main()
