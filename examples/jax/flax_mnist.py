"""Train a small convolutional network on handwritten digits with flax, on several processes.

    horovodrun -np 2 python examples/jax/flax_mnist.py

Batch normalisation sees the batches of all processes. The data are the 1,797 images that come with
scikit-learn. Lines that exist because of Horovod are marked "Horovod".
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.jax as hvd
from horovod.jax.linen import SyncBatchNorm


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of one process")
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), padding="VALID", use_bias=False)(x)
            x = SyncBatchNorm(use_running_average=not train, momentum=0.9)(x)  # Horovod
            x = nn.relu(x)
        return nn.Dense(10)(x.reshape(len(x), -1))


def main() -> int:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    # Horovod: every process trains on its own part of the images.
    train_images = train_images[hvd.rank() :: hvd.size()]
    train_labels = train_labels[hvd.rank() :: hvd.size()]

    network = Network()
    variables = network.init(jax.random.key(hvd.rank()), images[:1], train=False)
    # Horovod: as many steps on every process as the smallest part allows.
    steps = min(hvd.allgather_object(len(train_images))) // args.batch_size
    # Horovod: the learning rate grows in three epochs to that of all processes.
    rate = optax.linear_schedule(args.lr, args.lr * hvd.size(), 3 * steps)
    optimizer = hvd.DistributedOptimizer(optax.adam(rate))  # Horovod
    variables = hvd.broadcast_parameters(variables, root_rank=0)  # Horovod: begin alike
    params, statistics = variables["params"], variables["batch_stats"]
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params: Any, statistics: Any, opt_state: Any, images: Any, labels: Any) -> Any:
        def loss_of(params: Any) -> Any:
            logits, changed = network.apply(
                {"params": params, "batch_stats": statistics},
                images,
                train=True,
                mutable=["batch_stats"],
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return loss, changed["batch_stats"]

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), changed, opt_state, loss

    random = np.random.default_rng(hvd.rank())
    for epoch in range(args.epochs):
        order = random.permutation(len(train_images))
        for number in range(steps):
            chosen = order[number * args.batch_size : (number + 1) * args.batch_size]
            params, statistics, opt_state, loss = step(
                params, statistics, opt_state, train_images[chosen], train_labels[chosen]
            )
        metrics = hvd.average_metrics({"loss": loss})  # Horovod: over the processes
        hvd.stats.log(metrics)  # for `horovodrun --dashboard`
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {metrics['loss']:.4f}", flush=True)

    logits = network.apply({"params": params, "batch_stats": statistics}, test_images, train=False)
    accuracy = float((logits.argmax(axis=1) == test_labels).mean())
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.2%}", flush=True)
    return int(args.target_accuracy is not None and accuracy < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
