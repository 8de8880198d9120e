"""Search for a learning rate with Ray Tune; every trial trains with Horovod through Ray Train.

    python examples/ray/pytorch_ray_tune.py --num-workers 2 --lrs 0.001 0.02

Without --address it starts Ray on this machine alone. The data are the 1,797 images that come with
scikit-learn. Lines that exist because of Horovod are marked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.tune

from horovod.ray.train import HorovodTrainer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a running cluster, such as auto or ray://HOST:10001")
    parser.add_argument("--num-workers", type=int, default=2, help="processes of each trial")
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.001, 0.02])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--storage", type=Path, help="where results and checkpoints are kept")
    parser.add_argument("--target-accuracy", type=float, help="exit with status 1 if it is below")
    return parser.parse_args()


def train(config: dict[str, float]) -> None:
    """Runs on every worker of a trial."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn

    import horovod.torch as hvd

    hvd.init()  # Horovod
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    parts = train_test_split(images, torch.tensor(digits.target), test_size=0.2, random_state=0)
    train_x, test_x, train_y, test_y = parts
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # Horovod
    first, checkpoint = 0, ray.train.get_checkpoint()  # after a failure
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(saved["model"])
        first = saved["epoch"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # Horovod

    for epoch in range(first + 1, int(config["epochs"]) + 1):
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
        for batch in order[hvd.rank() :: hvd.size()][: len(order) // hvd.size()].split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": model.state_dict(), "epoch": epoch}, Path(folder, "state.pt"))
            kept = ray.train.Checkpoint.from_directory(folder) if hvd.rank() == 0 else None
            ray.train.report({"epoch": epoch, "accuracy": accuracy}, checkpoint=kept)


def main() -> int:
    options = parse_arguments()
    slots = len(options.lrs) * (options.num_workers + 1)
    ray.init(options.address, **({} if options.address else {"num_cpus": slots}))
    storage = str((options.storage or Path(tempfile.mkdtemp(prefix="ray-tune-"))).resolve())

    def trial(config: dict[str, float]) -> None:
        result = HorovodTrainer(
            train,
            train_loop_config={**config, "epochs": options.epochs},
            scaling_config=ray.train.ScalingConfig(num_workers=options.num_workers),
            run_config=ray.train.RunConfig(
                name=f"lr{config['lr']:g}",
                storage_path=storage,
                failure_config=ray.train.FailureConfig(max_failures=1),
            ),
        ).fit()
        ray.tune.report(result.metrics)

    results = ray.tune.Tuner(
        trial,
        param_space={"lr": ray.tune.grid_search(options.lrs)},
        run_config=ray.tune.RunConfig(name="tuning", storage_path=storage, verbose=0),
    ).fit()
    for result in results:
        print(f"lr {result.config['lr']:g}: accuracy {result.metrics['accuracy']:.3f}")
    best = results.get_best_result("accuracy", "max")
    print(f"best: lr {best.config['lr']:g} with test accuracy {best.metrics['accuracy']:.3f}")
    reached = best.metrics["accuracy"] >= (options.target_accuracy or 0)
    return 0 if reached and not results.errors else 1


if __name__ == "__main__":
    sys.exit(main())
