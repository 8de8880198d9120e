"""Train on handwritten digits on a Ray cluster while workers and nodes come and go.

    python examples/ray/pytorch_ray_elastic.py --min-workers 1 --max-workers 2
    python examples/ray/pytorch_ray_elastic.py --address auto --min-workers 2

Kill one of the workers (`kill -9`), or add a node (`ray start --address=...`), and watch the others
go on. The data are the 1,797 images that come with scikit-learn. Lines that exist because of
elastic training are marked.
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
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--max-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of one process")
    parser.add_argument("--target-accuracy", type=float, help="exit with status 1 if it is below")
    return parser.parse_args()


def train(epochs: int, batch_size: int, lr: float) -> float:
    """Runs on every worker; the test accuracy."""
    import os

    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    parts = train_test_split(images, torch.tensor(digits.target), test_size=0.2, random_state=0)
    train_x, test_x, train_y, test_y = parts
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=lr)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)  # Elastic

    @hvd.elastic.run  # Elastic
    def run(state: Any) -> None:
        while state.epoch < epochs:
            for group in optimizer.param_groups:  # Elastic: grows to the rate of those there now
                group["lr"] = lr * (1 + (hvd.size() - 1) * min(1.0, state.epoch / 3))
            order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(1))
            mine = order[hvd.rank() :: hvd.size()][: len(order) // hvd.size()]
            for batch in mine.split(batch_size):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(train_x[batch]), train_y[batch])
                loss.backward()
                optimizer.step()
            state.epoch += 1
            ray_logger.log(
                {"rank": hvd.rank(), "size": hvd.size(), "pid": os.getpid(), "epoch": state.epoch}
            )
            state.commit()  # Elastic: to here the job comes back

    run(state)
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    return accuracy.item()


def show(message: dict[str, int]) -> None:
    """Called here for everything that a worker logs."""
    if message["rank"] == 0:
        print(
            f"epoch {message['epoch']:2} with {message['size']} processes, "
            f"rank 0 has pid {message['pid']}",
            flush=True,
        )


def main() -> int:
    options = parse_arguments()
    ray.init(options.address, **({} if options.address else {"num_cpus": options.max_workers}))
    executor = RayExecutor(
        RayExecutor.create_settings(timeout_s=120),
        min_workers=options.min_workers,
        max_workers=options.max_workers,
    )
    executor.start()
    arguments = [options.epochs, options.batch_size, options.lr]
    accuracies = executor.run(train, args=arguments, callbacks=[show])
    print(f"test accuracy {accuracies[0]:.3f} with {len(accuracies)} processes")
    return 1 if options.target_accuracy and accuracies[0] < options.target_accuracy else 0


if __name__ == "__main__":
    sys.exit(main())
