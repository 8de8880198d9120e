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


def _history(
    jit: bool, steps: int, late_at: int | None = None, **options: Any
) -> list[list[np.ndarray]]:
    """The parameters of two layers after each step.

    The step `late_at` of rank 1 begins after that of rank 0 has ended.
    """
    optimizer = hvd.DistributedOptimizer(optax.sgd(LR), **options)
    params = {"one": {"w": jnp.full((2, 3), 3.0)}, "two": {"w": jnp.full((2, 3), 3.0)}}
    state = optimizer.init(params)

    def step(params: Any, state: Any, slope: Any) -> Any:
        gradients = {"one": {"w": slope}, "two": {"w": -slope}}
        updates, state = optimizer.update(gradients, state, params)
        return optimizer.end_step(optax.apply_updates(params, updates), state)

    step = jax.jit(step) if jit else step
    found = []
    for number in range(1, steps + 1):
        if number == late_at and hvd.rank() == 1:
            hvd.broadcast_object(None, 0, "go on")
        params, state = step(params, state, _slope(hvd.rank(), number))
        if number == late_at and hvd.rank() == 0:
            jax.block_until_ready(params)
            hvd.broadcast_object(None, 0, "go on")
        found.append([np.array(leaf) for leaf in jax.tree.leaves(params)])
    return found


def _reference(
    steps: int,
    every: int,
    warmup: int = 0,
    outer: Any = None,
    first: int | None = None,
    delay: int = 0,
    share: float = 0.0,
    sign: int = 1,
    clusters: Any = ((0,), (1,)),
) -> list[list[np.ndarray]]:
    """What each rank has of a layer after each step, from the definition of (streaming) DiLoCo."""
    lr, momentum, nesterov = (1, 0, False) if outer is None else vars(outer).values()
    anchor, velocity = np.full((2, 3), 3.0, np.float32), np.zeros((2, 3), np.float32)
    size = sum(len(cluster) for cluster in clusters)
    values, found, sent = [anchor] * size, [], anchor
    for step in range(1, steps + 1):
        slopes = [sign * _slope(rank, step) for rank in range(size)]
        for cluster in [range(size)] if step <= warmup else clusters:
            mean = sum(slopes[rank] for rank in cluster) / len(cluster)
            for rank in cluster:
                values[rank] = values[rank] - LR * mean
        turns = step - warmup - (every if first is None else first)
        if step <= warmup:
            anchor = values[0]
        if turns >= 0 and turns % every == 0:
            sent = anchor - sum(values) / size
        if turns >= delay and turns % every == delay:
            velocity = momentum * velocity + sent
            anchor = anchor - lr * (sent + momentum * velocity if nesterov else velocity)
            values = [share * value + (1 - share) * anchor for value in values]
        found.append(list(values))
    return found


def _check(results: Any, number: int, layer: int, expected: list[list[np.ndarray]]) -> None:
    """Compare what the training `number` of each rank has made of a layer with what it should."""
    for step, values in enumerate(expected):
        for rank, value in enumerate(values):
            np.testing.assert_array_equal(results[rank][number][step][layer], value)


def _histories(jit: bool, every: int, warmup: int) -> list[Any]:
    steps = warmup + 2 * every + 1
    return [
        _history(jit, steps, local_steps=every, warmup_steps=warmup, outer=outer)
        for outer in OUTERS
    ]


@pytest.mark.parametrize(("every", "warmup"), [(3, 2), (1, 0)])
@pytest.mark.parametrize("jit", [False, True])
def test_every_synchronisation_is_the_definition(
    jax_pool2: RankPool, jit: bool, every: int, warmup: int
):
    results = jax_pool2.run(_histories, jit, every, warmup)
    for number, outer in enumerate(OUTERS):
        _check(results, number, 0, _reference(warmup + 2 * every + 1, every, warmup, outer))


# -- fragments, delay and clusters ---------------------------------------------------------------

STEPS = 11
STREAMS: list[tuple[dict[str, Any], float]] = [  # with what remains of a rank's own parameters
    ({"local_steps": 4, "fragments": 2, "delay": 2, "outer": OUTERS[1], "warmup_steps": 1}, 0.5),
    ({"local_steps": 3, "fragments": 2, "delay": 2, "alpha": 0.25}, 0.25),
    ({"local_steps": 5, "fragments": 2}, 0.0),
]


def _streamed() -> list[Any]:
    """In the third step a fragment is sent, and with a delay no rank waits for another one."""
    return [
        _history(number < 3, STEPS, late_at=3 if "delay" in options else None, **options)
        for number, (options, _) in enumerate([*STREAMS, STREAMS[0]])
    ]


def test_fragments_take_turns_and_come_later(jax_pool2: RankPool):
    results = jax_pool2.run(_streamed)
    for number, (options, share) in enumerate([*STREAMS, STREAMS[0]]):
        every, outer = options["local_steps"], options.get("outer")
        warmup, delay = options.get("warmup_steps", 0), options.get("delay", 0)
        for layer, sign in enumerate((1, -1)):
            first = (layer + 1) * every // 2
            expected = _reference(STEPS, every, warmup, outer, first, delay, share, sign)
            _check(results, number, layer, expected)


def _clustered() -> list[Any]:
    pair, single = hvd.add_process_set([0, 1]), hvd.add_process_set([2])
    mine = single if hvd.rank() == 2 else pair
    with pytest.raises(ValueError, match="belongs to, and its ranks are"):
        hvd.DistributedOptimizer(
            optax.sgd(LR), local_steps=2, within=pair if hvd.rank() == 2 else single
        )
    found = [
        _history(jit, 6, local_steps=2, warmup_steps=1, within=within)
        for jit, within in ((True, mine), (False, "host"))
    ]
    hvd.remove_process_set(pair)
    hvd.remove_process_set(single)
    return found


def test_clusters_step_together(jax_pool3: RankPool):
    results = jax_pool3.run(_clustered)
    for number, clusters in enumerate([((0, 1), (2,)), ((0, 1, 2),)]):
        expected = _reference(6, 2, warmup=1, clusters=clusters)
        for step, values in enumerate(expected):
            made = [results[rank][number][step][0] for rank in range(3)]
            np.testing.assert_allclose(made, values, rtol=1e-5, atol=1e-5)
            assert np.array_equal(made[0], made[1])  # bit for bit, in every step
            is_synchronised = step in (0, 2, 4) or len(clusters) == 1
            assert np.array_equal(made[0], made[2]) == is_synchronised


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


def _resumed() -> list[np.ndarray]:
    options = {"warmup_steps": 1, "fragments": 2, "delay": 1, "average_state": True}
    whole, first, second = (_Training(**options) for _ in range(3))
    whole.train(range(8))
    first.train(range(5))  # a fragment is under way then
    saved = pickle.dumps(jax.tree.map(np.array, (first.params, first.state)))
    second.params, second.state = jax.tree.map(jnp.asarray, pickle.loads(saved))
    second.train(range(5, 8))
    jax.tree.map(np.testing.assert_array_equal, whole.leaves(), second.leaves())
    params, state = whole.optimizer.synchronize_parameters(whole.params, whole.state)
    kept = params, state.anchor, state.momentum, state.inner
    return [np.array(leaf) for leaf in jax.tree.leaves(kept)]


def test_resuming_equals_no_interruption(jax_pool2: RankPool):
    """Also: ranks that synchronise while a fragment is under way are equal then."""
    jax.tree.map(np.testing.assert_array_equal, *jax_pool2.run(_resumed))


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
        ({"delay": 1}, "delay needs local_steps"),
        ({"local_steps": 8, "fragments": 0}, "fragments must be"),
        ({"local_steps": 1, "fragments": 2}, "must not exceed local_steps=1"),
        ({"local_steps": 4, "delay": 4}, "delay=4 must be less than local_steps=4"),
        ({"local_steps": 4, "delay": 1, "alpha": 1.5}, "alpha must be"),
        ({"local_steps": 4, "alpha": 0.5}, "alpha needs delay"),
        ({"local_steps": 4, "within": "rack"}, "within must be the hvd.ProcessSet"),
        (
            {"local_steps": 4, "within": "host", "process_set": hvd.ProcessSet([0])},
            "leave process_set out",
        ),
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
    params = {"one": {"w": jnp.zeros(2), "b": jnp.zeros(1)}, "two": jnp.zeros(2)}
    with pytest.raises(ValueError, match="the number of layers, 2, and is 3"):
        hvd.DistributedOptimizer(optax.sgd(0.1), local_steps=4, fragments=3).init(params)
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
