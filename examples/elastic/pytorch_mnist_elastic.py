"""Train on handwritten digits while processes and hosts come and go.

    horovodrun -np 2 --min-np 1 --max-np 4 -H localhost:4 \\
        python examples/elastic/pytorch_mnist_elastic.py
    horovodrun -np 2 --min-np 2 --host-discovery-script ./hosts \\
        python examples/elastic/pytorch_mnist_elastic.py

Kill one of its processes (`kill -9`) and watch the others go on. It also runs as it is under plain
horovodrun, torchrun, mpirun, or alone. The data are the 1,797 images that come with scikit-learn.
Lines that exist because of elastic training are marked "Elastic".
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--batches-per-commit", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.0015, help="learning rate of one process")
    parser.add_argument(
        "--warmup-epochs", type=int, default=3, help="epochs until it is that of all processes"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument(
        "--checkpoint-dir", type=Path, help="keep commits on disk too, to outlive even the launcher"
    )
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    parts = train_test_split(
        digits.images / 16.0, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    train_x, test_x = (torch.tensor(x, dtype=torch.float32).unsqueeze(1) for x in parts[:2])
    train_y, test_y = (torch.tensor(y) for y in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def choose_device(cpu_only: bool) -> torch.device:
    kind = None if cpu_only else torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.device("cpu")
    index = hvd.local_rank() % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of images the model gets right; every process looks at its part of them."""
    model.eval()
    images, labels = (t[hvd.rank() :: hvd.size()].to(device) for t in data.tensors)
    correct = (model(images).argmax(1) == labels).sum()
    counts = torch.tensor([int(correct), len(labels)])
    right, seen = hvd.allreduce(counts, name="accuracy", op=hvd.Sum).tolist()
    return right / seen


def main() -> int:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    # Elastic: before init, what a new process may do while the others train.
    train_data, test_data = load_data()
    model = make_model()
    hvd.init()
    device = choose_device(args.no_cuda)
    model.to(device)
    # Elastic: divides what is left of an epoch among the processes that are there.
    sampler = hvd.elastic.ElasticSampler(train_data, seed=args.seed)
    loader = DataLoader(train_data, args.batch_size, sampler=sampler)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=args.lr),
        named_parameters=model.named_parameters(),
    )

    def adapt_learning_rate(epoch: int) -> None:
        # Horovod: grows with the first epochs to that of all processes which there are now.
        progress = min(1.0, epoch / args.warmup_epochs) if args.warmup_epochs else 1.0
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 + (hvd.size() - 1) * progress)

    def train_batch(images: Tensor, labels: Tensor) -> None:
        # Elastic: first, because a step that a failure interrupted has left gradients behind.
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        hvd.stats.log(loss=loss)  # for `horovodrun --dashboard`

    @hvd.elastic.run  # Elastic: comes back here when the processes have changed
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            adapt_learning_rate(state.epoch)
            model.train()
            for batch, (images, labels) in enumerate(loader):
                train_batch(images, labels)
                # Elastic: remember what was seen, and from time to time where we are.
                state.sampler.record_batch(batch, len(labels))
                if (batch + 1) % args.batches_per_commit == 0:
                    state.commit()
            result = accuracy(model, test_data, device)
            if hvd.rank() == 0:
                text = f"test accuracy {result:.2%} with {hvd.size()} process(es)"
                print(f"epoch {state.epoch + 1:2}: {text}", flush=True)
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)  # Elastic: at the end of an epoch
            state.commit()

    # Elastic: all that training needs to go on; what is not in it is lost with a process.
    state = hvd.elastic.TorchState(
        model, optimizer, sampler=sampler, epoch=0, checkpoint_dir=args.checkpoint_dir
    )
    train(state)
    result = accuracy(model, test_data, device)
    if hvd.rank() == 0:
        print(f"final test accuracy: {result:.2%}", flush=True)
    return int(args.target_accuracy is not None and result < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
