"""Train on handwritten digits in Spark tasks: the function API, `horovod.spark.run`.

    spark-submit --master 'local[2]' examples/spark/pytorch/pytorch_spark_run_mnist.py
    spark-submit --master spark://HOST:7077 examples/spark/pytorch/pytorch_spark_run_mnist.py

The executors need Horovod, torch and scikit-learn, whose 1,797 images are the data. Every task
loads all of them and trains on its part; to train from a DataFrame use an estimator instead.
"""

from __future__ import annotations

import argparse
import sys

from pyspark.sql import SparkSession

import horovod.spark


def train(epochs: int, batch_size: int, lr: float) -> tuple[float, float]:
    """Runs in every task. Loss and test accuracy, over all ranks."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import horovod.torch as hvd
    from horovod.spark.task import get_available_devices

    hvd.init()
    torch.manual_seed(42)
    gpus = get_available_devices()  # those that Spark assigned to this task
    device = f"cuda:{gpus[0]}" if gpus and torch.cuda.is_available() else "cpu"

    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    data = TensorDataset(images, torch.tensor(digits.target))
    split = torch.randperm(len(data)).tolist()
    train_set = torch.utils.data.Subset(data, split[360:])
    test_set = torch.utils.data.Subset(data, split[:360])
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    loss = torch.zeros(())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for group in optimizer.param_groups:  # grows to the rate of all ranks in three epochs
            group["lr"] = lr * (1 + (hvd.size() - 1) * min(1.0, epoch / 3))
        for images, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {mean:.3f}", flush=True)

    model.eval()
    mine = torch.utils.data.Subset(test_set, range(hvd.rank(), len(test_set), hvd.size()))
    right = torch.zeros(2)
    with torch.no_grad():
        for images, target in DataLoader(mine, batch_size=360):
            right[0] += (model(images.to(device)).argmax(1).cpu() == target).sum()
            right[1] += len(target)
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    return mean, (right[0] / right[1]).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, help="default: all slots of the cluster")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per task and step")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of one process")
    parser.add_argument("--target-accuracy", type=float, help="exit with status 1 below it")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("digits").getOrCreate()
    results = horovod.spark.run(
        train, args=(args.epochs, args.batch_size, args.lr), num_proc=args.num_proc
    )
    spark.stop()
    _, accuracy = results[0]
    print(f"final test accuracy: {accuracy:.2%}, {len(results)} process(es)")
    return int(args.target_accuracy is not None and accuracy < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
