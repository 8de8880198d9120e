"""Train ResNet-50 the way it is trained on ImageNet: warm-up, step decay, resuming, accumulation.

    horovodrun -np 2 python examples/pytorch/pytorch_imagenet_resnet50.py
    horovodrun -np 2 python examples/pytorch/pytorch_imagenet_resnet50.py \
        --depth 10 --width 16 --image-size 32 --classes 10 --batches-per-epoch 20 --epochs 3

The images are made up (`SyntheticImages`), so nothing is downloaded: put a dataset of your own, for
example torchvision's ImageFolder, in its place. Run the same command again and training goes on
after the last epoch that is on disk. Lines that a single-process script would not have are marked
"Horovod".
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from resnet import DEPTHS, resnet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import horovod.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, choices=sorted(DEPTHS), default=50)
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batches-per-epoch", type=int, default=100, help="steps in an epoch")
    parser.add_argument("--val-batches", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in one forward pass")
    parser.add_argument(
        "--batches-per-allreduce",
        type=int,
        default=1,
        help="batches whose gradients a process adds up before it exchanges them",
    )
    parser.add_argument("--base-lr", type=float, default=0.0125, help="for one batch")
    parser.add_argument("--warmup-epochs", type=float, default=5)
    parser.add_argument(
        "--decay-epochs",
        type=float,
        nargs="*",
        default=[30, 60, 80],
        help="epochs after which the learning rate falls to a tenth",
    )
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=5e-5, help="weight decay")
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--fp16-allreduce", action="store_true", help="16 bits on the wire")
    parser.add_argument("--checkpoint-format", default="checkpoints/resnet-{epoch}.pt")
    parser.add_argument("--workers", type=int, default=2, help="data loading processes, each")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


# -- data ----------------------------------------------------------------------------------------


class SyntheticImages(Dataset):
    """A coarse pattern for each class, under noise. An image depends on its number only."""

    def __init__(self, length: int, classes: int, size: int, seed: int, first: int = 0) -> None:
        self.length, self.classes, self.size = length, classes, size
        self.first_seed = (seed << 32) + first
        self.patterns = torch.randn(classes, 3, 4, 4, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first_seed + index)
        label = int(torch.randint(self.classes, (), generator=generator))
        noise = torch.randn(3, self.size, self.size, generator=generator)
        return noise + F.interpolate(self.patterns[label, None], size=self.size)[0], label


def load_data(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Batches for training (as many at once as go into one step) and for validation."""
    step = args.batch_size * args.batches_per_allreduce
    length = args.batches_per_epoch * step * hvd.size()
    val_length = args.val_batches * args.batch_size * hvd.size()
    train = SyntheticImages(length, args.classes, args.image_size, args.seed)
    val = SyntheticImages(val_length, args.classes, args.image_size, args.seed, first=length)

    def loader(data: Dataset, batch_size: int, shuffle: bool) -> DataLoader:
        # Horovod: every process sees its own part of the data.
        sampler = DistributedSampler(
            data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle, seed=args.seed
        )
        return DataLoader(data, batch_size, sampler=sampler, num_workers=args.workers)

    return loader(train, step, True), loader(val, args.batch_size, False)


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


# -- training ------------------------------------------------------------------------------------


def learning_rate(args: argparse.Namespace, epoch: float) -> float:
    """Horovod: grows from one batch's rate to that of all batches of a step, then falls in steps.

    A large rate from the start would throw the untrained model off.
    """
    full = args.base_lr * args.batches_per_allreduce * hvd.size()
    if epoch < args.warmup_epochs:
        return args.base_lr + (full - args.base_lr) * epoch / args.warmup_epochs
    return full * 0.1 ** sum(epoch >= boundary for boundary in args.decay_epochs)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    epoch: int,
    args: argparse.Namespace,
) -> tuple[float, float]:
    """One pass over this process's part of the data; loss and accuracy over all processes."""
    model.train()
    totals = torch.zeros(3, device=device)
    for step, (images, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, epoch + step / args.batches_per_epoch)
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        # Horovod: the last backward pass of a step exchanges what all of them added up.
        for part, wanted in zip(
            images.split(args.batch_size), labels.split(args.batch_size), strict=True
        ):
            output = model(part)
            loss = F.cross_entropy(output, wanted, label_smoothing=args.label_smoothing)
            (loss * len(wanted) / len(labels)).backward()
            add_metrics(totals, loss, output, wanted)
        optimizer.step()
    return average_metrics(totals, "train")


@torch.no_grad()
def validate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> tuple[float, float]:
    model.eval()
    totals = torch.zeros(3, device=device)
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        output = model(images)
        add_metrics(totals, F.cross_entropy(output, labels), output, labels)
    return average_metrics(totals, "validation")


def add_metrics(totals: Tensor, loss: Tensor, output: Tensor, labels: Tensor) -> None:
    totals[0] += loss.detach() * len(labels)
    totals[1] += (output.argmax(1) == labels).sum()
    totals[2] += len(labels)


def average_metrics(totals: Tensor, name: str) -> tuple[float, float]:
    """Horovod: loss and accuracy over the images of all processes."""
    loss, correct, count = hvd.allreduce(totals, name=f"{name} metrics", op=hvd.Sum).tolist()
    return loss / count, correct / count


def shows_progress() -> bool:
    """Only rank 0 draws a bar, and only where somebody watches.

    Under horovodrun a process writes to a pipe; the launcher says whether a terminal is behind.
    """
    watched = sys.stderr.isatty() or os.environ.get("HOROVOD_LAUNCHER_TTY") == "1"
    return hvd.rank() == 0 and watched


# -- checkpoints ---------------------------------------------------------------------------------


def save_checkpoint(
    name: str, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Horovod: rank 0 alone writes. A crash on the way leaves no half a file of that name."""
    if hvd.rank() == 0:
        path = Path(name.format(epoch=epoch))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        os.replace(partial, path)


def epochs_done(args: argparse.Namespace) -> int:
    """Horovod: rank 0 looks for the newest checkpoint; the others may not even see its disk."""
    epochs = range(args.epochs, 0, -1)
    done = [e for e in epochs if Path(args.checkpoint_format.format(epoch=e)).exists()]
    return hvd.broadcast_object(done[0] if done else 0, root_rank=0, name="epochs done")


def main() -> None:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    torch.manual_seed(args.seed)
    device = choose_device(args.no_cuda)  # Horovod: one GPU for each process
    say = print if hvd.rank() == 0 else lambda *_, **__: None

    train_loader, val_loader = load_data(args)
    model = resnet(args.depth, args.classes, args.width).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.base_lr, momentum=args.momentum, weight_decay=args.wd
    )
    first = epochs_done(args)
    if first > 0 and hvd.rank() == 0:
        state = torch.load(args.checkpoint_format.format(epoch=first), map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    # Horovod: all start from what rank 0 has.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # Horovod: average the gradients over all processes before every step.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
    )

    images = args.batches_per_epoch * args.batches_per_allreduce * args.batch_size * hvd.size()
    say(
        f"ResNet-{args.depth} on {hvd.size()} process(es), {device.type}, {images} images an epoch"
        + (f", resuming after epoch {first}" if first else ""),
        flush=True,
    )
    for epoch in range(first, args.epochs):
        train_loader.sampler.set_epoch(epoch)  # Horovod: shuffle anew, alike on all processes
        started = time.monotonic()
        bar = tqdm(
            train_loader,
            desc=f"epoch {epoch + 1}/{args.epochs}",
            disable=not shows_progress(),
            leave=False,
            ncols=80,
        )
        loss, accuracy = train_epoch(model, optimizer, bar, device, epoch, args)
        seconds = time.monotonic() - started
        # Horovod: each process has batch statistics of its own; go on with those that are saved.
        hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
        val_loss, val_accuracy = validate(model, val_loader, device)
        # For `horovodrun --dashboard`.
        hvd.stats.log(loss=loss, accuracy=accuracy, val_loss=val_loss, val_accuracy=val_accuracy)
        save_checkpoint(args.checkpoint_format, epoch + 1, model, optimizer)
        say(
            f"epoch {epoch + 1}: lr {optimizer.param_groups[0]['lr']:.5f}, loss {loss:.4f}, "
            f"accuracy {accuracy:.2%}, validation loss {val_loss:.4f}, "
            f"accuracy {val_accuracy:.2%}, {images / seconds:.1f} images/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
