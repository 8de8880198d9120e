"""Train on handwritten digits in Spark tasks that may be lost and replaced: `run_elastic`.

    spark-submit --master spark://HOST:7077 \\
        examples/spark/pytorch/pytorch_spark_elastic_mnist.py --num-proc 2 --max-num-proc 4

Kill an executor and watch the others go on; start one more worker of Spark and watch it join. The
executors need Horovod, torch and scikit-learn, whose 1,797 images are the data. Lines that exist
because of elastic training are marked "Elastic".
"""

from __future__ import annotations

import argparse
import sys

from pyspark.sql import SparkSession

import horovod.spark
from horovod.spark.conf import SPARK_CONF_ALWAYS_RESTART_FAILED_TASK


def train(epochs: int, batch_size: int, lr: float) -> tuple[float, int]:
    """Runs in every task. Accuracy on all data, and how many processes there were at the end."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(42)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).flatten(1)
    data = TensorDataset(images, torch.tensor(digits.target))
    sampler = hvd.elastic.ElasticSampler(data)  # Elastic: knows what was processed already
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    state = hvd.elastic.TorchState(  # Elastic: what must outlive a process
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0
    )

    @hvd.elastic.run  # Elastic: called again after the processes have changed
    def loop(state: hvd.elastic.TorchState) -> tuple[float, int]:
        while state.epoch < epochs:
            for index, (images, target) in enumerate(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(images), target).backward()
                optimizer.step()
                sampler.record_batch(index, batch_size)  # Elastic
                if index % 5 == 4:
                    state.commit()  # Elastic: from here it goes on after a failure
            if hvd.rank() == 0:
                print(f"epoch {state.epoch + 1:2}: {hvd.size()} process(es)", flush=True)
            state.epoch += 1
            sampler.set_epoch(state.epoch)  # Elastic
            state.commit()  # Elastic
        with torch.no_grad():
            right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()
        return right, hvd.size()

    return loop(state)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="tasks to begin with")
    parser.add_argument("--min-num-proc", type=int, default=1)
    parser.add_argument("--max-num-proc", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per task and step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--target-accuracy", type=float, help="exit with status 1 below it")
    args = parser.parse_args()

    builder = SparkSession.builder.appName("elastic digits")
    # Elastic: otherwise Spark ends the job after the fourth failure of a task.
    spark = builder.config(*SPARK_CONF_ALWAYS_RESTART_FAILED_TASK).getOrCreate()
    (result, *_) = horovod.spark.run_elastic(
        train,
        args=(args.epochs, args.batch_size, args.lr),
        num_proc=args.num_proc,
        min_num_proc=args.min_num_proc,
        max_num_proc=args.max_num_proc,
    )
    spark.stop()
    accuracy, size = result
    print(f"final accuracy: {accuracy:.2%}, {size} process(es)")
    return int(args.target_accuracy is not None and accuracy < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
