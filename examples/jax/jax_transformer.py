"""Train a small transformer to sort numbers, with plain JAX and optax, on several processes.

    horovodrun -np 2 python examples/jax/jax_transformer.py

The data are made up: rows of numbers, and the same rows in order. Gradients of several passes are
added up before processes exchange them. Lines that exist because of Horovod are marked "Horovod".
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import horovod.jax as hvd

LENGTH, VOCABULARY = 12, 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64, help="rows per process and pass")
    parser.add_argument("--passes", type=int, default=1, help="passes per step of the optimizer")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


def make_parameters(key: Any, width: int, layers: int) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 3 + 4 * layers))

    def dense(rows: int, columns: int) -> Any:
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    return {
        "tokens": dense(VOCABULARY, width),
        "positions": dense(LENGTH, width),
        "layers": [
            {
                "attention": dense(width, 3 * width),
                "projection": dense(width, width),
                "inner": dense(width, 4 * width),
                "outer": dense(4 * width, width),
                "scales": jnp.ones((2, width)),
            }
            for _ in range(layers)
        ],
        "output": dense(width, VOCABULARY),
    }


def normalised(x: Any, scale: Any) -> Any:
    return scale * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def predict(params: dict[str, Any], rows: Any, heads: int) -> Any:
    x = params["tokens"][rows] + params["positions"]
    for layer in params["layers"]:
        queries, keys, values = jnp.split(
            normalised(x, layer["scales"][0]) @ layer["attention"], 3, axis=-1
        )
        split = (*x.shape[:2], heads, x.shape[2] // heads)
        mixed = jax.nn.dot_product_attention(
            queries.reshape(split), keys.reshape(split), values.reshape(split)
        )
        x = x + mixed.reshape(x.shape) @ layer["projection"]
        x = x + jax.nn.gelu(normalised(x, layer["scales"][1]) @ layer["inner"]) @ layer["outer"]
    return x @ params["output"]


def main() -> int:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes

    # Horovod: the gradients of all processes, exchanged every `passes` passes.
    optimizer = hvd.DistributedOptimizer(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(args.lr)),
        backward_passes_per_step=args.passes,
        average_aggregated_gradients=True,
    )
    params = make_parameters(jax.random.key(0), args.width, args.layers)
    params = hvd.broadcast_parameters(params, root_rank=0)  # Horovod: begin alike
    opt_state = optimizer.init(params)

    @jax.jit
    def train(params: Any, opt_state: Any, key: Any) -> Any:
        rows = jax.random.randint(key, (args.batch_size, LENGTH), 0, VOCABULARY)

        def loss_of(params: Any) -> Any:
            logits = predict(params, rows, args.heads)
            wanted = jnp.sort(rows, axis=1)
            accuracy = jnp.mean(logits.argmax(axis=-1) == wanted)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
            return losses.mean(), accuracy

        (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        # Horovod: averages over the processes, as part of the compiled step.
        metrics = hvd.average_metrics({"loss": loss, "accuracy": accuracy})
        return optax.apply_updates(params, updates), opt_state, metrics

    key = jax.random.key(1 + hvd.rank())  # Horovod: other rows on every process
    began = time.monotonic()
    for number in range(args.steps):
        key, now = jax.random.split(key)
        params, opt_state, metrics = train(params, opt_state, now)
        if number % 10 == 0:
            hvd.stats.log(metrics)  # for `horovodrun --dashboard`
        if hvd.rank() == 0 and (number + 1) % 50 == 0:
            rate = (number + 1) / (time.monotonic() - began)
            text = f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.2%}"
            print(f"step {number + 1:4}: {text}, {rate:.1f} steps/s", flush=True)
    accuracy = float(metrics["accuracy"])
    if hvd.rank() == 0:
        print(f"accuracy: {accuracy:.2%}", flush=True)
    return int(args.target_accuracy is not None and accuracy < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
