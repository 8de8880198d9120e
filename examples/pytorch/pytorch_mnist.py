"""Train a small convolutional network on handwritten digits, on as many processes as you like.

    horovodrun -np 2 python examples/pytorch/pytorch_mnist.py
    torchrun --nproc-per-node 2 examples/pytorch/pytorch_mnist.py
    mpirun -np 2 python examples/pytorch/pytorch_mnist.py
    python examples/pytorch/pytorch_mnist.py

The data are the 1,797 images that come with scikit-learn, or MNIST if `--data-dir` holds its four
IDX files (gzipped or not). Lines that a single-process script would not have are marked "Horovod".
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import horovod.torch as hvd

IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's IDX files")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.0015, help="learning rate of one process")
    parser.add_argument(
        "--warmup-epochs", type=int, default=3, help="epochs until it is that of all processes"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--fp16-allreduce", action="store_true", help="16 bits on the wire")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps with Adasum")
    parser.add_argument(
        "--gradient-predivide-factor",
        type=float,
        default=1.0,
        help="how much of the division by the number of processes to do before the sum",
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/mnist.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


# -- data ----------------------------------------------------------------------------------------


def load_data(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images (one channel, values 0 to 1) with their labels."""
    if data_dir is not None:
        return load_idx(data_dir, "train"), load_idx(data_dir, "test")
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images / 16.0, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    return as_dataset(train_x, train_y), as_dataset(test_x, test_y)


def load_idx(data_dir: Path, part: str) -> TensorDataset:
    images, labels = (read_idx(data_dir, name) for name in IDX_FILES[part])
    return as_dataset(images / 255.0, labels)


def read_idx(data_dir: Path, name: str) -> np.ndarray:
    """One IDX file: two zero bytes, the type (8: bytes), the number of dimensions, the shape."""
    plain, packed = data_dir / name, data_dir / f"{name}.gz"
    if not plain.exists() and not packed.exists():
        raise SystemExit(f"{data_dir} has neither {name} nor {name}.gz")
    content = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise SystemExit(f"{name} in {data_dir} is not an IDX file of bytes")
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def as_dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    return TensorDataset(
        torch.tensor(images, dtype=torch.float32).unsqueeze(1),
        torch.tensor(labels, dtype=torch.int64),
    )


# -- model ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two convolutions and two linear layers, for square images of any size."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(32 * (image_size // 2) ** 2, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


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


def learning_rate_factor(use_adasum: bool, device: torch.device) -> int:
    """N processes take N times the batch in one step, so the step may be N times as long.

    Adasum finds the right length of the combined step by itself; on GPUs, processes of one machine
    count as one that takes their batches together.
    """
    if not use_adasum:
        return hvd.size()
    return hvd.local_size() if device.type == "cuda" and hvd.nccl_built() else 1


def learning_rate(args: argparse.Namespace, device: torch.device, epoch: float) -> float:
    """Horovod: grows from the rate of one process to that of all of them.

    A large rate from the start would throw the untrained model off.
    """
    progress = min(1.0, epoch / args.warmup_epochs) if args.warmup_epochs else 1.0
    return args.lr * (1 + (learning_rate_factor(args.use_adasum, device) - 1) * progress)


# -- training ------------------------------------------------------------------------------------


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Collection[tuple[Tensor, Tensor]],
    device: torch.device,
    epoch: int,
    args: argparse.Namespace,
) -> float:
    """One pass over this process's share of the data; the loss averaged over all processes."""
    model.train()
    total = torch.zeros((), device=device)
    for number, (images, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, device, epoch + number / len(batches))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        if number % 10 == 0:  # not in every step: to read it is to wait for the GPU
            hvd.stats.log(loss=loss)  # for `horovodrun --dashboard`
        total += loss.detach()
    return hvd.allreduce(total / len(batches), name="loss").item()


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of images the model gets right; every process looks at its part of them."""
    model.eval()
    images, labels = (t[hvd.rank() :: hvd.size()] for t in data.tensors)
    correct = sum(
        (model(x.to(device)).argmax(1) == y.to(device)).sum()
        for x, y in zip(images.split(512), labels.split(512), strict=True)
    )
    # Horovod: add counts, not rates, so that unequal parts weigh what they should.
    counts = torch.tensor([int(correct), len(labels)], dtype=torch.int64)
    right, seen = hvd.allreduce(counts, name="accuracy", op=hvd.Sum).tolist()
    return right / seen


def shows_progress() -> bool:
    """Only rank 0 draws a bar, and only where somebody watches.

    Under horovodrun a process writes to a pipe; the launcher says whether a terminal is behind.
    """
    watched = sys.stderr.isatty() or os.environ.get("HOROVOD_LAUNCHER_TTY") == "1"
    return hvd.rank() == 0 and watched


# -- checkpoints ---------------------------------------------------------------------------------


def save_checkpoint(
    path: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Horovod: rank 0 alone writes. A crash on the way leaves the previous file whole."""
    if hvd.rank() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Rank 0 reads the file; returns the number of epochs done, which all ranks learn."""
    done = 0
    if hvd.rank() == 0 and path.exists():
        state = torch.load(path, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epoch"]
    return hvd.broadcast_object(done, root_rank=0, name="epochs done")


def main() -> int:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    torch.manual_seed(args.seed)
    device = choose_device(args.no_cuda)  # Horovod: one GPU for each process
    say = print if hvd.rank() == 0 else lambda *_, **__: None

    train_data, test_data = load_data(args.data_dir)
    # Horovod: every process sees its own part of the training data.
    sampler = DistributedSampler(
        train_data, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
    )
    loader = DataLoader(train_data, args.batch_size, sampler=sampler)

    model = Net(image_size=train_data.tensors[0].shape[-1]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    first = load_checkpoint(args.checkpoint, model, optimizer) if args.resume else 0
    # Horovod: all start from what rank 0 has.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # Horovod: average the gradients over all processes before every step.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    say(
        f"training on {len(train_data)} images with {hvd.size()} process(es) on {device.type}"
        + (f", from epoch {first + 1}" if first else ""),
        flush=True,
    )
    started = time.monotonic()
    result = accuracy(model, test_data, device)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)  # Horovod: shuffle anew, alike on all processes
        bar = tqdm(
            loader,
            desc=f"epoch {epoch + 1}/{args.epochs}",
            disable=not shows_progress(),
            leave=False,
            ncols=80,
        )
        loss = train_epoch(model, optimizer, bar, device, epoch, args)
        result = accuracy(model, test_data, device)
        hvd.stats.log(accuracy=result)
        save_checkpoint(args.checkpoint, epoch + 1, model, optimizer)
        say(f"epoch {epoch + 1:2}: loss {loss:.4f}, test accuracy {result:.2%}", flush=True)

    seconds = time.monotonic() - started
    say(f"final test accuracy: {result:.2%} after {seconds:.1f} s", flush=True)
    if args.target_accuracy is not None and result < args.target_accuracy:
        say(f"below the target of {args.target_accuracy:.2%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
