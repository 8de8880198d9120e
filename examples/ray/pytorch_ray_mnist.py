"""Train a small CNN on handwritten digits, on the workers of a Ray cluster.

    python examples/ray/pytorch_ray_mnist.py --num-workers 2
    python examples/ray/pytorch_ray_mnist.py --address auto --num-hosts 2 --workers-per-host 4

Without --address it starts Ray on this machine alone. The data are the 1,797 images that come with
scikit-learn. Lines that exist because of Horovod are marked.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import ray

from horovod.ray import RayExecutor, ray_logger


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a running cluster, such as auto or ray://HOST:10001")
    parser.add_argument("--num-workers", type=int, default=2, help="processes in all")
    parser.add_argument("--num-hosts", type=int, help="nodes to use, instead of --num-workers")
    parser.add_argument("--workers-per-host", type=int, default=1)
    parser.add_argument("--use-gpu", action="store_true", help="a GPU for every process")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of one process")
    parser.add_argument("--target-accuracy", type=float, help="exit with status 1 if it is below")
    return parser.parse_args()


def train(epochs: int, batch_size: int, lr: float, use_gpu: bool) -> float:
    """Runs on every worker; the test accuracy."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn

    import horovod.torch as hvd

    hvd.init()  # Horovod
    torch.manual_seed(1)
    device = torch.device("cuda", hvd.local_rank()) if use_gpu else torch.device("cpu")
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    parts = train_test_split(images, torch.tensor(digits.target), test_size=0.2, random_state=0)
    train_x, test_x, train_y, test_y = (part.to(device) for part in parts)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).to(device)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=lr)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # Horovod
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # Horovod
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # Horovod

    for epoch in range(1, epochs + 1):
        for group in optimizer.param_groups:  # Horovod: grows to the rate of all processes
            group["lr"] = lr * (1 + (hvd.size() - 1) * min(1.0, (epoch - 1) / 3))
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
        mine = order[hvd.rank() :: hvd.size()][: len(order) // hvd.size()]  # Horovod
        for batch in mine.split(batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(train_x[batch]), train_y[batch])
            loss.backward()
            optimizer.step()
        loss = hvd.allreduce(loss.detach(), name="loss")  # Horovod
        if hvd.rank() == 0:
            ray_logger.log({"epoch": epoch, "loss": loss.item()})
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    return hvd.allreduce(accuracy, name="accuracy").item()  # Horovod


def show(message: dict[str, float]) -> None:
    """Called here for everything that a worker logs."""
    print(f"epoch {message['epoch']:2}: loss {message['loss']:.3f}", flush=True)


def main() -> int:
    options = parse_arguments()
    ray.init(options.address, **({} if options.address else {"num_cpus": options.num_workers}))
    where = (
        {"num_workers": options.num_workers}
        if options.num_hosts is None
        else {"num_hosts": options.num_hosts, "num_workers_per_host": options.workers_per_host}
    )
    executor = RayExecutor(
        RayExecutor.create_settings(timeout_s=120), use_gpu=options.use_gpu, **where
    )
    executor.start()
    try:
        accuracies = executor.run(
            train,
            args=[options.epochs, options.batch_size, options.lr, options.use_gpu],
            callbacks=[show],
        )
    finally:
        executor.shutdown()
    print(f"test accuracy {accuracies[0]:.3f} with {len(accuracies)} processes")
    return 1 if options.target_accuracy and accuracies[0] < options.target_accuracy else 0


if __name__ == "__main__":
    sys.exit(main())
