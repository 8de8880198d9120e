"""Train on handwritten digits with JAX while processes and hosts come and go.

    horovodrun -np 2 --min-np 1 --max-np 4 -H localhost:4 \\
        python examples/elastic/jax_mnist_elastic.py
    horovodrun -np 2 --min-np 2 --host-discovery-script ./hosts \\
        python examples/elastic/jax_mnist_elastic.py

Kill one of its processes (`kill -9`) and watch the others go on. It also runs as it is under plain
horovodrun or alone. The data are the 1,797 images that come with scikit-learn. Lines that exist
because of elastic training are marked "Elastic".
"""

from __future__ import annotations

import argparse
import sys
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
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps-per-epoch", type=int, default=100, help="of all together")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--batches-per-commit", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


def predict(params: dict[str, Any], images: Any) -> Any:
    return jax.nn.relu(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_of(params: dict[str, Any], images: Any, labels: Any) -> Any:
    logits = predict(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> int:
    args = parse_arguments()
    # Elastic: before init, what a new process may do while the others train.
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )

    hvd.init()  # Horovod: find the other processes
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "w1": 0.1 * jax.random.normal(first, (64, 128)),
        "b1": jnp.zeros(128),
        "w2": 0.1 * jax.random.normal(second, (128, 10)),
        "b2": jnp.zeros(10),
    }
    optimizer = hvd.DistributedOptimizer(optax.adam(args.lr))  # Horovod: average the gradients
    random = np.random.default_rng()

    @jax.jit  # Elastic: compiled once, it goes on working when the processes have changed
    def step(params: Any, opt_state: Any, images: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    @hvd.elastic.run  # Elastic: comes back here when the processes have changed
    def train(state: hvd.elastic.JaxState) -> None:
        while state.epoch < args.epochs:
            loss = None
            for _ in range(state.batch, args.steps_per_epoch // hvd.size()):
                chosen = random.integers(0, len(train_images), args.batch_size)
                state.params, state.opt_state, loss = step(
                    state.params, state.opt_state, train_images[chosen], train_labels[chosen]
                )
                hvd.stats.log(loss=loss)  # for `horovodrun --dashboard`
                state.batch += 1
                # Elastic: from time to time remember where we are.
                if state.batch % args.batches_per_commit == 0:
                    state.commit()
            if hvd.rank() == 0 and loss is not None:
                text = f"loss {float(loss):.4f} with {hvd.size()} process(es)"
                print(f"epoch {state.epoch + 1:2}: {text}", flush=True)
            state.epoch += 1
            state.batch = 0
            state.commit()

    # Elastic: all that training needs to go on; what is not in it is lost with a process.
    state = hvd.elastic.JaxState(params=params, opt_state=optimizer.init(params), epoch=0, batch=0)
    train(state)
    correct = predict(state.params, test_images).argmax(axis=1) == test_labels
    accuracy = float(correct.mean())
    if hvd.rank() == 0:
        print(f"final test accuracy: {accuracy:.2%} with {hvd.size()} process(es)", flush=True)
    return int(args.target_accuracy is not None and accuracy < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
