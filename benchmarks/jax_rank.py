"""One rank of benchmarks/jax.py: takes the same steps whenever it is told to.

Started by `benchmarks/jax.py` as a module, with a plan in JSON as the only argument. Every order is
answered with the seconds of a step and the loss of the last one.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.processes import Member

BATCH = {"mlp": 64, "transformer": 8}
LENGTH, VOCABULARY, WIDTH, LAYERS, HEADS = 32, 256, 128, 4, 4


# -- models ----------------------------------------------------------------------------------


def make_parameters(model: str) -> Any:
    random = np.random.default_rng(1)

    def dense(rows: int, columns: int) -> Any:
        return jnp.float32(random.standard_normal((rows, columns)) * rows**-0.5)

    if model == "mlp":
        sizes = [784, 1024, 1024, 10]
        return [
            {"w": dense(rows, columns), "b": jnp.zeros(columns)}
            for rows, columns in itertools.pairwise(sizes)
        ]
    return {
        "tokens": dense(VOCABULARY, WIDTH),
        "positions": dense(LENGTH, WIDTH),
        "layers": [
            {
                "attention": dense(WIDTH, 3 * WIDTH),
                "projection": dense(WIDTH, WIDTH),
                "inner": dense(WIDTH, 4 * WIDTH),
                "outer": dense(4 * WIDTH, WIDTH),
                "scales": jnp.ones((2, WIDTH)),
            }
            for _ in range(LAYERS)
        ],
        "output": dense(WIDTH, VOCABULARY),
    }


def predict(model: str, params: Any, inputs: Any) -> Any:
    if model == "mlp":
        for layer in params[:-1]:
            inputs = jax.nn.relu(inputs @ layer["w"] + layer["b"])
        return inputs @ params[-1]["w"] + params[-1]["b"]

    def normalised(x: Any, scale: Any) -> Any:
        return scale * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    x = params["tokens"][inputs] + params["positions"]
    for layer in params["layers"]:
        mixed = normalised(x, layer["scales"][0]) @ layer["attention"]
        split = (*x.shape[:2], HEADS, WIDTH // HEADS)
        queries, keys, values = (part.reshape(split) for part in jnp.split(mixed, 3, axis=-1))
        attended = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
        x = x + attended.reshape(x.shape) @ layer["projection"]
        x = x + jax.nn.gelu(normalised(x, layer["scales"][1]) @ layer["inner"]) @ layer["outer"]
    return x @ params["output"]


def make_data(model: str, rank: int) -> tuple[Any, Any]:
    """Inputs and labels, others on every rank."""
    random = np.random.default_rng(1000 + rank)
    if model == "mlp":
        inputs = random.standard_normal((BATCH[model], 784)).astype(np.float32)
        return inputs, random.integers(0, 10, BATCH[model]).astype(np.int32)
    rows = random.integers(0, VOCABULARY, (BATCH[model], LENGTH + 1)).astype(np.int32)
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: str, params: Any, inputs: Any, labels: Any) -> Any:
    logits = predict(model, params, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# -- contenders ------------------------------------------------------------------------------

Step = Callable[[Any, Any, Any, Any], Any]


def local_step(model: str, optimizer: Any) -> Step:
    def step(params: Any, state: Any, inputs: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: loss_of(model, p, inputs, labels))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def start(plan: dict[str, Any]) -> tuple[Step, list[Any]]:
    """A compiled step, and what it is called with first: parameters, state, inputs, labels."""
    model, rank = plan["model"], plan["rank"]
    optimizer = optax.sgd(0.01, momentum=0.9)
    if plan["contender"] == "distributed":
        return start_distributed(plan, optimizer)
    if plan["contender"] == "ours":
        import horovod.jax as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer)
    params = make_parameters(model)
    step = jax.jit(local_step(model, optimizer), donate_argnums=(0, 1))
    inputs, labels = map(jnp.asarray, make_data(model, rank))
    return step, [params, optimizer.init(params), inputs, labels]


def start_distributed(plan: dict[str, Any], optimizer: Any) -> tuple[Step, list[Any]]:
    """What JAX offers itself: one program on a mesh of the processes."""
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(plan["coordinator"], plan["size"], plan["rank"])
    mesh = jax.make_mesh((plan["size"],), ("ranks",))
    model, everywhere, split = plan["model"], PartitionSpec(), PartitionSpec("ranks")

    def body(params: Any, state: Any, inputs: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: loss_of(model, p, inputs, labels))(params)
        gradients = jax.tree.map(lambda g: jax.lax.psum(g, "ranks") / plan["size"], gradients)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss[None]

    step = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(everywhere, everywhere, split, split),
            out_specs=(everywhere, everywhere, split),
            check_vma=False,  # the gradients are this rank's until psum
        ),
        donate_argnums=(0, 1),
    )

    def placed(tree: Any, spec: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree
        )

    params = make_parameters(model)
    state = optimizer.init(params)
    inputs, labels = make_data(model, plan["rank"])
    return step, [
        placed(params, everywhere),
        placed(state, everywhere),
        placed(inputs, split),
        placed(labels, split),
    ]


def main(plan: dict[str, Any]) -> None:
    member = Member()
    step, (params, state, inputs, labels) = start(plan)

    def turn(_: Any) -> dict[str, float]:
        nonlocal params, state
        jax.block_until_ready(params)
        began = time.perf_counter()
        for _ in range(plan["steps"]):
            params, state, loss = step(params, state, inputs, labels)
        jax.block_until_ready((params, loss))
        seconds = (time.perf_counter() - began) / plan["steps"]
        own = loss.addressable_data(0) if plan["contender"] == "distributed" else loss
        return {"seconds": seconds, "loss": float(np.asarray(own).reshape(()))}

    member.obey(turn)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
