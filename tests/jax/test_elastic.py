"""JaxState, and a compiled training that goes on when ranks come and go."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import horovod.jax as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.elastic.training import this_worker
from tests.ranks import RankPool, start_ranks
from tests.tensorflow.growing import await_another, grow_and_lose, halt

# -- states ----------------------------------------------------------------------------------


def _restored() -> None:
    """As often as needed, whatever JAX has done with the memory in between."""
    dtypes = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32, jnp.bool_, jnp.complex64]
    params = {dtype.__name__: jnp.asarray([[1, 0]], dtype) for dtype in dtypes}
    params["empty"] = jnp.zeros((0, 2))
    state = hvd.elastic.JaxState(
        params=params, key=jax.random.key(1), rates=(0.5, jnp.float32(2)), epoch=1, name="x"
    )
    change = jax.jit(lambda tree: jax.tree.map(lambda a: a * 0, tree), donate_argnums=0)
    state.params = {**state.params, "float32": state.params["float32"] + 4}
    state.epoch = 2
    state.save()
    saved = jax.tree.map(np.array, state.params)
    for _ in range(3):
        state.params = change(state.params)  # in place
        state.key = jax.random.key(5)
        state.rates = (7.0, jnp.float32(7))
        state.epoch, state.name = 3, "y"
        state.restore()
        jax.tree.map(np.testing.assert_array_equal, state.params, saved)
        assert jax.tree.map(jnp.dtype, state.params) == jax.tree.map(jnp.dtype, params)
        assert bool(jax.random.bits(state.key) == jax.random.bits(jax.random.key(1)))
        assert state.rates[0] == 0.5
        assert isinstance(state.rates[0], float)
        assert state.rates[1].item() == 2
        assert (state.epoch, state.name) == (2, "x")


def _synchronised() -> list[Any]:
    rank = hvd.rank()
    params = {"w": jnp.full((3, 100), rank + 0.5, jnp.bfloat16)}
    state = hvd.elastic.JaxState(
        params=params, opt_state=optax.adam(1.0).init(params), step=10 + rank
    )
    state._root = 1  # the loop says whose state is the newest
    state.sync()
    state.params = {"w": jnp.zeros((3, 100), jnp.bfloat16)}
    state.restore()  # to what was synchronised, without any commit
    return [float(state.params["w"][2, 99]), state.step, type(state.opt_state[0]).__name__]


def test_states(jax_pool2: RankPool):
    jax_pool2.run(_restored)
    assert jax_pool2.run(_synchronised) == [[1.5, 11, "ScaleByAdamState"]] * 2


def _different(rank: int, size: int) -> None:
    hvd.init()
    hvd.elastic.JaxState(params={"a": jnp.zeros(2), "w": jnp.zeros(2 + rank)}).sync()


def test_trees_that_differ_end_the_rank_that_cannot_take_the_others():
    with start_ranks(_different, 2) as ranks:
        first, second = ranks.wait(240)
    assert "['params']['w'] is (3,)float32 here and (2,)float32 there" in second.error
    assert "['params']['a']" not in second.error
    assert "PeerLostError: rank 1" in first.error


def _errors() -> list[str]:
    @jax.jit
    def mismatched(x: Any) -> Any:
        return hvd.allreduce({"a" if hvd.rank() else "b": x})

    def buggy() -> Any:
        raise KeyError("a bug")

    messages = []
    for step, kind in (
        (lambda: jax.block_until_ready(mismatched(jnp.ones(2))), HorovodInternalError),
        (buggy, KeyError),
    ):
        state = hvd.elastic.JaxState(step=0)
        with pytest.raises(kind) as caught:
            hvd.elastic.run(lambda state, step=step: step())(state)
        messages.append(str(caught.value))
    return messages


def test_errors_of_ours_are_found_in_those_of_a_program_and_others_are_the_users(
    jax_pool2: RankPool,
):
    for ours, users in jax_pool2.run(_errors):
        assert ours.startswith("'allreduce.jit': mismatched tree between ranks")
        assert "not recovered, because this job is not elastic" in ours
        assert "a bug" in users


# -- a compiled step outlives its ranks ------------------------------------------------------


def _train() -> dict[str, Any]:
    """Gradients differ between ranks, but their average does not depend on the ranks."""
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1, momentum=0.5))
    begin = {"w": jnp.float32([1.0 + int(this_worker()[1:]), 2.0])}
    traces = []

    @jax.jit
    def step(params: Any, opt_state: Any, share: Any) -> Any:
        traces.append(1)
        gradients = jax.grad(lambda p: share * jnp.sum((p["w"] - jnp.float32([3.0, -1.0])) ** 2))(
            params
        )
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def everybody(x: Any) -> Any:  # its shape depends on the number of ranks
        return hvd.allgather(x)

    gathered = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        share = jnp.float32(1.0 + 0.5 * (hvd.rank() - (hvd.size() - 1) / 2))
        gathered.append(everybody(jnp.ones(1)).shape[0])
        while state.step < 10:
            state.params, state.opt_state = step(state.params, state.opt_state, share)
            state.step += 1
            if state.step == 3:
                await_another()
            elif state.step == 7 and this_worker() == "w0":
                jax.block_until_ready(state.params)
                halt()  # the other one is stuck in its next step
            if state.step % 2 == 0:
                state.commit()

    state = hvd.elastic.JaxState(params=begin, opt_state=optimizer.init(begin), step=0)
    train(state)
    reached = state.params["w"].tolist()
    params = {"w": jnp.float32([1.0, 2.0])}  # what w0 began with
    opt_state = optimizer.init(params)
    for _ in range(10):
        params, opt_state = step(params, opt_state, jnp.float32(1.0))
    return {
        "weights": reached,
        "expected": params["w"].tolist(),
        "gathered": gathered,
        "size": hvd.size(),
    }


def test_training_goes_on_with_the_new_ranks():
    result = grow_and_lose(_train)
    assert result["size"] == 1
    assert result["gathered"] == [2, 1]
    assert result["weights"] == pytest.approx(result["expected"], abs=1e-5)
