"""DistributedOptimizer(local_steps=...): what ranks make of their local steps together."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import horovod.jax as hvd
from tests.ranks import RankPool, start_ranks

LR = 0.5
OUTERS = [None, hvd.OuterSGD(0.5, 0.5), hvd.OuterSGD(0.25, 0.5, nesterov=False)]


def _slope(rank: int, step: int) -> np.ndarray:
    """The gradient: whole numbers, so that halves of them add up exactly."""
    random = np.random.default_rng([rank, step])
    return random.integers(-4, 5, (2, 3)).astype(np.float32)


def _history(jit: bool, steps: int, **options: Any) -> list[np.ndarray]:
    """The parameter after each step, from another start on each rank."""
    optimizer = hvd.DistributedOptimizer(optax.sgd(LR), **options)
    params = {"w": jnp.full((2, 3), 3.0)}
    state = optimizer.init(params)

    def step(params: Any, state: Any, slope: Any) -> Any:
        updates, state = optimizer.update({"w": slope}, state, params)
        return optimizer.end_step(optax.apply_updates(params, updates), state)

    step = jax.jit(step) if jit else step
    found = []
    for number in range(1, steps + 1):
        params, state = step(params, state, _slope(hvd.rank(), number))
        found.append(np.array(params["w"]))
    return found


def _histories(jit: bool, every: int, warmup: int) -> list[list[np.ndarray]]:
    steps = warmup + 2 * every + 1
    return [
        _history(jit, steps, local_steps=every, warmup_steps=warmup, outer=outer)
        for outer in OUTERS
    ]


def _reference(steps: int, every: int, warmup: int, outer: Any) -> list[list[np.ndarray]]:
    """What each of two ranks has after each step, from the definition of DiLoCo."""
    lr, momentum, nesterov = (1, 0, False) if outer is None else vars(outer).values()
    anchor, velocity = np.full((2, 3), 3.0, np.float32), np.zeros((2, 3), np.float32)
    values, found = [anchor, anchor], []
    for step in range(1, steps + 1):
        slopes = [_slope(rank, step) for rank in range(2)]
        if step <= warmup:
            slopes = [sum(slopes) / 2] * 2
        values = [value - LR * slope for value, slope in zip(values, slopes, strict=True)]
        if step <= warmup:
            anchor = values[0]
        elif (step - warmup) % every == 0:
            gradient = anchor - sum(values) / 2
            velocity = momentum * velocity + gradient
            anchor = anchor - lr * (gradient + momentum * velocity if nesterov else velocity)
            values = [anchor] * 2
        found.append(values)
    return found


@pytest.mark.parametrize(("every", "warmup"), [(3, 2), (1, 0)])
@pytest.mark.parametrize("jit", [False, True])
def test_every_synchronisation_is_the_definition(
    jax_pool2: RankPool, jit: bool, every: int, warmup: int
):
    results = jax_pool2.run(_histories, jit, every, warmup)
    for number, outer in enumerate(OUTERS):
        expected = _reference(warmup + 2 * every + 1, every, warmup, outer)
        for step, values in enumerate(expected):
            for rank, value in enumerate(values):
                np.testing.assert_array_equal(results[rank][number][step], value)


# -- a real training -----------------------------------------------------------------------------


class _Training:
    """Adam on a small network, in bfloat16 in part, with data of this rank."""

    def __init__(self, **options: Any) -> None:
        self.optimizer = hvd.DistributedOptimizer(
            optax.adam(0.05), local_steps=3, outer=hvd.OuterSGD(), **options
        )
        random = np.random.default_rng(hvd.rank())  # the ranks begin with other parameters
        hidden = jnp.float32(random.normal(size=(4, 6)))
        out = jnp.asarray(random.normal(size=(6, 2)), jnp.bfloat16)
        self.params: Any = {"hidden": hidden, "out": out}
        self.state = self.optimizer.init(self.params)
        self._step = jax.jit(self._one_step, donate_argnums=(0, 1))

    def _one_step(self, params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - 1) ** 2)

        updates, state = self.optimizer.update(jax.grad(loss)(params), state, params)
        return self.optimizer.end_step(optax.apply_updates(params, updates), state)

    def train(self, steps: range) -> None:
        for step in steps:
            x = np.random.default_rng([hvd.rank(), step]).normal(size=(8, 4)).astype(np.float32)
            self.params, self.state = self._step(self.params, self.state, x)

    def leaves(self) -> list[np.ndarray]:
        return [np.array(leaf) for leaf in jax.tree.leaves((self.params, self.state))]


def _equal_parts() -> dict[str, list[Any]]:
    training = _Training(average_state=True, compression=hvd.Compression.bf16)
    training.train(range(6))  # two synchronisations
    found = {"synchronised": training.leaves()}
    training.train(range(6, 8))
    found["between"] = training.leaves()
    training.params, training.state = training.optimizer.synchronize_parameters(
        training.params, training.state
    )
    found["at the end"] = training.leaves()
    return found


def test_ranks_are_equal_after_each_synchronisation(jax_pool2: RankPool):
    one, other = jax_pool2.run(_equal_parts)
    for moment in ("synchronised", "at the end"):  # with the state, which is averaged
        jax.tree.map(np.testing.assert_array_equal, one[moment], other[moment])
    assert not np.array_equal(one["between"][0], other["between"][0])


def _resumed() -> None:
    whole, first, second = (_Training(warmup_steps=1) for _ in range(3))
    whole.train(range(9))
    first.train(range(5))
    saved = pickle.dumps(jax.tree.map(np.array, (first.params, first.state)))
    second.params, second.state = jax.tree.map(jnp.asarray, pickle.loads(saved))
    second.train(range(5, 9))
    jax.tree.map(np.testing.assert_array_equal, whole.leaves(), second.leaves())


def test_resuming_equals_no_interruption(jax_pool2: RankPool):
    jax_pool2.run(_resumed)


def _without_end_step() -> list[Any]:
    params = {"w": jnp.zeros(2)}
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), local_steps=2, warmup_steps=1)
    state = optimizer.init(params)
    updates = []
    for _ in range(4):
        update, state = optimizer.update({"w": jnp.full(2, float(hvd.rank()))}, state, params)
        updates.append(update["w"][0].item())
    return updates


def test_without_end_step_the_warm_up_does_not_end(jax_pool2: RankPool):
    assert jax_pool2.run(_without_end_step) == [[-0.5] * 4] * 2


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, "local_steps must be a number of at least 1, not 0"),
        ({"local_steps": 2, "warmup_steps": -1}, "warmup_steps must be"),
        ({"local_steps": 2, "outer": 0.7}, "outer must be a hvd.OuterSGD"),
        ({"local_steps": 2, "outer": hvd.OuterSGD(momentum=1.0)}, "momentum of hvd.OuterSGD"),
        ({"outer": hvd.OuterSGD()}, "outer needs local_steps"),
        ({"average_state": True}, "average_state needs local_steps"),
        ({"local_steps": 2, "backward_passes_per_step": 2}, "optax.MultiSteps"),
        ({"local_steps": 2, "op": hvd.Sum}, "leave op at hvd.Average"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(optax.sgd(0.1), **options)


def _differing() -> str:
    with pytest.raises(ValueError, match="differs") as caught:
        hvd.DistributedOptimizer(optax.sgd(0.1), local_steps=2 + hvd.rank())
    return str(caught.value)


def test_different_local_steps_are_refused_on_all_ranks(jax_pool2: RankPool):
    expected = "local_steps of DistributedOptimizer differs between ranks: 2 on rank 0, 3 on rank 1"
    assert jax_pool2.run(_differing) == [expected] * 2


def _forgetful(rank: int, size: int) -> None:
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), local_steps=2)
    params = jnp.ones(3)
    optimizer.update(params, optimizer.init(params), params)


def test_a_program_that_never_ends_a_step_is_told():
    with start_ranks(_forgetful, 1) as ranks:
        (outcome,) = ranks.wait()
    assert "end_step was never called" in outcome.output
