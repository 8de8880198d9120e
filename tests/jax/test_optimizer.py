"""DistributedOptimizer, value_and_grad and grad: training on all ranks' gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import horovod.jax as hvd
from tests.ranks import RankPool

STEPS = 5
ROWS = 8


def data(seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(2 * ROWS, 6)).astype(np.float32)
    return x, (x @ random.normal(size=(6, 3))).astype(np.float32)


def model(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "hidden": {"w": jnp.float32(random.normal(size=(6, 5))), "b": jnp.zeros(5)},
        "out": jnp.float32(random.normal(size=(5, 3))),
    }


def loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def train(optimizer: Any, params: Any, x: Any, y: Any, jit: bool, gradient: Any) -> Any:
    state = optimizer.init(params)

    def step(params: Any, state: Any) -> Any:
        _, gradients = gradient(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1)) if jit else step
    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def alone() -> Any:
    x, y = data()
    return train(optax.adam(0.05), model(0), x, y, False, jax.value_and_grad(loss))


def together(jit: bool, wrapped: str) -> Any:
    rank = hvd.rank()
    x, y = data()
    x, y = x[rank * ROWS : (rank + 1) * ROWS], y[rank * ROWS : (rank + 1) * ROWS]
    params = hvd.broadcast_parameters(model(rank), root_rank=0)
    if wrapped == "optimizer":
        optimizer = hvd.DistributedOptimizer(optax.adam(0.05))
        return train(optimizer, params, x, y, jit, jax.value_and_grad(loss))
    return train(optax.adam(0.05), params, x, y, jit, hvd.value_and_grad(loss))


@pytest.mark.parametrize("wrapped", ["optimizer", "gradients"])
@pytest.mark.parametrize("jit", [False, True])
def test_training_together_is_training_alone_on_all_data(
    jax_pool2: RankPool, jit: bool, wrapped: str
):
    first, second = jax_pool2.run(together, jit, wrapped)
    jax.tree.map(np.testing.assert_array_equal, first, second)  # bit by bit
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), first, alone()
    )


def _passes(jit: bool, average: bool) -> list[Any]:
    optimizer = hvd.DistributedOptimizer(
        optax.sgd(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    params = {"w": jnp.zeros(2)}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update) if jit else optimizer.update
    seen = []
    for number in range(4):
        gradient = {"w": jnp.full(2, float(number + hvd.rank()))}
        updates, state = update(gradient, state, params)
        seen.append(updates["w"][0].item())
    assert int(state.passes) == 0
    return seen


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_several_passes_per_step(jax_pool2: RankPool, jit: bool, average: bool):
    # Sums over two passes of number + rank, averaged over the ranks: 2, and 6.
    divisor = 2 if average else 1
    expected = [0.0, -2.0 / divisor, 0.0, -6.0 / divisor]
    assert jax_pool2.run(_passes, jit, average) == [expected] * 2


def _options() -> list[Any]:
    rank = hvd.rank()
    gradient = {"w": jnp.float32([1 + 2**-12 + rank])}
    found = []
    for options in (
        {"op": hvd.Sum},
        {"compression": hvd.Compression.bf16},
        {"gradient_predivide_factor": 2.0},
        {"op": hvd.Adasum},
    ):
        optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), **options)
        updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(gradient), gradient)
        found.append(-updates["w"].item())
    gradients, aux = hvd.grad(lambda w: (rank * w.sum(), "aux"), has_aux=True)(jnp.ones(2))
    value, (a, b) = hvd.value_and_grad(lambda a, b: (rank + 1) * a * b, argnums=(0, 1))(2.0, 3.0)
    return [*found, gradients.tolist(), aux, value.item(), a.item(), b.item()]


def test_options(jax_pool2: RankPool):
    for rank, (total, brain, divided, adasum, gradients, aux, value, a, b) in enumerate(
        jax_pool2.run(_options)
    ):
        assert total == pytest.approx(3 + 2**-11, abs=1e-6)
        assert brain == 1.5
        assert divided == pytest.approx(1.5 + 2**-12, abs=1e-6)
        assert adasum == pytest.approx(1.5, rel=0.01)  # of parallel gradients: their average
        assert (gradients, aux) == ([0.5, 0.5], "aux")
        assert (value, a, b) == ((rank + 1) * 6.0, 4.5, 3.0)


def _inside_a_chain() -> list[Any]:
    """Clipping sees the reduced gradient; an optimizer that wants the loss gets it."""
    optimizer = hvd.DistributedOptimizer(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    )
    params = jnp.zeros(1)
    updates, _ = optimizer.update(jnp.float32([4.0 * hvd.rank()]), optimizer.init(params), params)
    plateau = hvd.DistributedOptimizer(optax.contrib.reduce_on_plateau(patience=1))
    state = plateau.init(params)
    passed, _ = plateau.update(jnp.float32([hvd.rank()]), state, params, value=jnp.float32(1.0))
    return [updates.item(), passed.item()]


def test_optax_transformations_see_reduced_gradients(jax_pool2: RankPool):
    assert jax_pool2.run(_inside_a_chain) == [[-1.0, 0.5]] * 2


def _wrong() -> None:
    for options, message in [
        ({"optimizer": 0.1}, "must be an optax transformation"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be positive"),
        ({"op": hvd.Max}, "op must be one of Average, Sum, Adasum, not"),
        ({"gradient_predivide_factor": 0.0}, "must be a positive number"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op=Average"),
    ]:
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(**{"optimizer": optax.sgd(0.1), **options})


def test_wrong_options(jax_pool2: RankPool):
    jax_pool2.run(_wrong)


def _members_only() -> float:
    evens = hvd.add_process_set([0, 2])
    try:
        optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), process_set=evens)
        w = jnp.zeros(1)
        updates, _ = jax.jit(optimizer.update)(jnp.float32([hvd.rank()]), optimizer.init(w), w)
        return -updates.item()
    finally:
        hvd.remove_process_set(evens)


def test_ranks_outside_of_the_process_set_train_alone(jax_pool3: RankPool):
    assert jax_pool3.run(_members_only) == [1.0, 1.0, 1.0]


def _parameters() -> list[Any]:
    rank = hvd.rank()
    tree = {
        "w": jnp.full(3, float(rank), jnp.bfloat16),
        "key": jax.random.key(rank),
        "old_key": jax.random.PRNGKey(rank),
        "rate": 0.5 + rank,
        "step": rank,
        "numpy": np.full(2, rank, np.float32),
    }
    sent = hvd.broadcast_parameters({**tree, "state": optax.adam(1.0).init(tree["w"])}, 1)
    assert isinstance(sent["step"], int)
    assert bool(jax.random.bits(sent["key"]) == jax.random.bits(jax.random.key(1)))
    np.testing.assert_array_equal(sent["old_key"], jax.random.PRNGKey(1))
    return [sent["w"].tolist(), sent["rate"], sent["step"], sent["numpy"].tolist()]


def test_broadcast_parameters(jax_pool2: RankPool):
    assert jax_pool2.run(_parameters) == [[[1.0] * 3, 1.5, 1, [1.0, 1.0]]] * 2


def _objects() -> list[Any]:
    rank = hvd.rank()
    return [hvd.broadcast_object({"epoch": rank}, 1), hvd.allgather_object("x" * rank)]


def test_objects(jax_pool2: RankPool):
    assert jax_pool2.run(_objects) == [[{"epoch": 1}, ["", "x"]]] * 2
