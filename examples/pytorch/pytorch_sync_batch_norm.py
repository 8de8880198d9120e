"""Train with batches too small for batch normalisation: statistics and gradients of many at once.

    horovodrun -np 2 python examples/pytorch/pytorch_sync_batch_norm.py

`hvd.SyncBatchNorm` normalises by the batches of all processes together, and each process adds up
the gradients of several batches before they are exchanged. There are two ways to say when, and
`--accumulation` chooses: to count the backward passes, or to mark those that exchange nothing. The
data are the 1,797 handwritten digits that come with scikit-learn. Lines that a single-process
script would not have are marked "Horovod".
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=4, help="images in one forward pass")
    parser.add_argument("--batches-per-step", type=int, default=4, help="backward passes in a step")
    parser.add_argument("--accumulation", choices=["count", "no-sync"], default="count")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of one process")
    parser.add_argument(
        "--warmup-epochs", type=int, default=2, help="epochs until it is that of all processes"
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/sync_batch_norm.pt"))
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images with their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    train_x, test_x, train_y, test_y = train_test_split(
        images, torch.tensor(digits.target), test_size=0.2, random_state=0, stratify=digits.target
    )
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def make_model() -> nn.Module:
    def layers(channels: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    model = nn.Sequential(*layers(1, 16), *layers(16, 32), nn.Flatten(), nn.Linear(128, 10))
    # Horovod: the layers written above, with the statistics of all processes.
    return hvd.SyncBatchNorm.convert_sync_batchnorm(model)


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


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    args: argparse.Namespace,
) -> Tensor:
    """One step on several batches; their average loss. The last step of an epoch has fewer."""
    optimizer.zero_grad()
    batches = list(zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True))
    total = torch.zeros((), device=images.device)
    for number, (part, wanted) in enumerate(batches):
        last = number == len(batches) - 1
        # Horovod: with no_sync, a backward pass exchanges nothing. Else passes are counted, and
        # step() exchanges what has come, even if there were fewer than announced.
        waits = args.accumulation == "no-sync" and not last
        with optimizer.no_sync() if waits else contextlib.nullcontext():
            loss = F.cross_entropy(model(part), wanted) * len(wanted) / len(labels)
            loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def learning_rate(args: argparse.Namespace, epoch: float) -> float:
    """Horovod: grows from the rate of one process to that of all of them.

    A large rate from the start would throw the untrained model off.
    """
    progress = min(1.0, epoch / args.warmup_epochs) if args.warmup_epochs else 1.0
    return args.lr * (1 + (hvd.size() - 1) * progress)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of images the model gets right; every process looks at its part of them."""
    model.eval()
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
    loader = DataLoader(train_data, args.batch_size * args.batches_per_step, sampler=sampler)
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    # Horovod: all start from what rank 0 has.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # Horovod: average the gradients over all processes after so many backward passes.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.batches_per_step if args.accumulation == "count" else 1,
    )

    say(
        f"{hvd.size()} process(es) on {device.type}; {args.batch_size} images in a forward pass, "
        f"{args.batch_size * hvd.size()} in a normalisation, "
        f"{args.batch_size * args.batches_per_step * hvd.size()} in a step",
        flush=True,
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # Horovod: shuffle anew, alike on all processes
        model.train()
        total = torch.zeros((), device=device)
        bar = tqdm(
            loader,
            desc=f"epoch {epoch + 1}/{args.epochs}",
            disable=not shows_progress(),
            leave=False,
            ncols=80,
        )
        for number, (images, labels) in enumerate(bar):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, epoch + number / len(loader))
            total += train_step(model, optimizer, images.to(device), labels.to(device), args)
        loss = hvd.allreduce(total / len(loader), name="loss").item()
        rate = accuracy(model, test_data, device)
        say(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {rate:.2%}", flush=True)
    if hvd.rank() == 0:  # Horovod: all have the same model, one writes it
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), args.checkpoint)


if __name__ == "__main__":
    main()
