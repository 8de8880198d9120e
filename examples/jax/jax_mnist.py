"""Train a small network on handwritten digits with plain JAX and optax, on several processes.

    horovodrun -np 2 python examples/jax/jax_mnist.py

The data are the 1,797 images that come with scikit-learn. Lines that exist because of Horovod are
marked "Horovod".
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.jax as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of one process")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send float16")
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


def make_parameters(key: Any, hidden: int) -> dict[str, Any]:
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": 0.1 * jax.random.normal(first, (64, hidden)), "b": jnp.zeros(hidden)},
        "output": {"w": 0.1 * jax.random.normal(second, (hidden, 10)), "b": jnp.zeros(10)},
    }


def predict(params: dict[str, Any], images: Any) -> Any:
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["output"]["w"] + params["output"]["b"]


def loss_of(params: dict[str, Any], images: Any, labels: Any) -> Any:
    logits = predict(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> int:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    if jax.default_backend() == "gpu":  # Horovod: one GPU for each process
        devices = jax.local_devices()
        jax.config.update("jax_default_device", devices[hvd.local_rank() % len(devices)])

    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    # Horovod: every process trains on its own part of the images.
    train_images = train_images[hvd.rank() :: hvd.size()]
    train_labels = train_labels[hvd.rank() :: hvd.size()]

    # Horovod: as many steps on every process as the smallest part has batches.
    steps = math.ceil(min(hvd.allgather_object(len(train_images))) / args.batch_size)
    # Horovod: with more images in a step, a larger learning rate, which it approaches in three
    # epochs: from the start it would throw the untrained model off.
    rate = optax.linear_schedule(args.lr, args.lr * hvd.size(), 3 * steps)
    optimizer = hvd.DistributedOptimizer(  # Horovod: the gradients of all processes
        optax.adam(rate),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    params = make_parameters(jax.random.key(hvd.rank()), args.hidden)
    params = hvd.broadcast_parameters(params, root_rank=0)  # Horovod: begin alike
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any, images: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    random = np.random.default_rng(hvd.rank())
    for epoch in range(args.epochs):
        began = time.monotonic()
        order = random.permutation(len(train_images))
        for number in range(steps):
            chosen = order[number * args.batch_size : (number + 1) * args.batch_size]
            params, opt_state, loss = step(
                params, opt_state, train_images[chosen], train_labels[chosen]
            )
        metrics = hvd.average_metrics({"loss": loss})  # Horovod: over the processes
        hvd.stats.log(metrics)  # for `horovodrun --dashboard`
        if hvd.rank() == 0:
            speed = steps * args.batch_size * hvd.size() / (time.monotonic() - began)
            print(
                f"epoch {epoch + 1:2}: loss {metrics['loss']:.4f}, {speed:.0f} images/s", flush=True
            )

    correct = predict(params, test_images).argmax(axis=1) == test_labels
    accuracy = float(correct.mean())
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.2%}", flush=True)
    return int(args.target_accuracy is not None and accuracy < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
