"""The collectives on arrays of a GPU: two ranks that share one, and one rank alone.

Two ranks on one GPU exchange through host memory, as NCCL refuses to; one rank alone goes the way
of a device. Skipped where JAX and torch do not both have a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import horovod.jax as hvd
from tests.jax.conftest import jax_pool
from tests.jax.test_collectives import FLOATS, INTEGERS, MOVED, of_rank
from tests.ranks import RankPool

SHARED = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # or the first rank takes all memory
    "JAX_DEFAULT_MATMUL_PRECISION": "float32",  # or products are rounded to a few digits
}


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU")

MODES = ["eager", "jit"]


@pytest.fixture(scope="module", params=[1, 2])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    for pool in jax_pool(request.param, SHARED):
        if not all(pool.run(has_gpu, timeout=300)):
            pytest.skip("JAX has no GPU")
        yield pool


def on_gpu(*arrays: Any) -> None:
    for array in arrays:
        assert {device.platform for device in array.devices()} == {"gpu"}, array.devices()


def compiled(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function) if mode == "jit" else function


def elastic_or_not(forced: bool) -> None:
    """A rank alone leaves compiled reductions out, unless it must not: as if more could come."""
    from horovod.engine.runtime import runtime

    if forced:
        runtime.is_elastic = lambda: True  # type: ignore[method-assign]
    else:
        runtime.__dict__.pop("is_elastic", None)


def _reduce(mode: str) -> None:
    elastic_or_not(True)
    try:
        with jax.enable_x64(True):
            for dtype in [*FLOATS, *INTEGERS]:
                everybody = [of_rank(dtype, (5, 4), rank) for rank in range(hvd.size())]
                mine = jnp.asarray(everybody[hvd.rank()])
                step = compiled(
                    mode,
                    lambda x: (
                        hvd.allreduce(x, op=hvd.Sum),
                        hvd.allreduce({"a": x, "b": x[:1]}, op=hvd.Sum, prescale_factor=2.0),
                    ),
                )
                for _ in range(3):
                    alone, tree = step(mine)
                    total = np.sum([each.astype(complex) for each in everybody], axis=0)
                    on_gpu(alone, tree["a"])
                    np.testing.assert_allclose(np.asarray(alone).astype(complex), total, rtol=0.02)
                    doubled = np.asarray(tree["a"]).astype(complex)
                    np.testing.assert_allclose(doubled, 2 * total, rtol=0.02)
    finally:
        elastic_or_not(False)


@pytest.mark.parametrize("mode", MODES)
def test_reducing(pool: RankPool, mode: str):
    pool.run(_reduce, mode)


def _move(mode: str) -> None:
    size, rank = hvd.size(), hvd.rank()
    with jax.enable_x64(True):
        for dtype in MOVED:
            everybody = [of_rank(dtype, (4, 3), each) for each in range(size)]
            mine = jnp.asarray(everybody[rank])
            last = size - 1

            def step(x: Any, last: int = last) -> list[Any]:
                return [
                    hvd.allgather(x),
                    hvd.broadcast(x, last),
                    hvd.alltoall(x),
                    hvd.broadcast({"a": x, "b": [x]}, last)["b"][0],
                ]

            gathered, sent, exchanged, leaf = compiled(mode, step)(mine)
            on_gpu(gathered, sent, exchanged, leaf)
            rows = 4 // size
            parts = [each[rank * rows : (rank + 1) * rows] for each in everybody]
            np.testing.assert_array_equal(gathered, np.concatenate(everybody))
            np.testing.assert_array_equal(sent, everybody[last])
            np.testing.assert_array_equal(leaf, everybody[last])
            np.testing.assert_array_equal(exchanged, np.concatenate(parts))
            if dtype in ("float32", "int32"):
                scattered = compiled(mode, lambda x: hvd.reducescatter(x, op=hvd.Sum))(mine)
                on_gpu(scattered)
                total = np.sum(everybody, axis=0)
                np.testing.assert_allclose(scattered, total[rank * rows : (rank + 1) * rows])


@pytest.mark.parametrize("mode", MODES)
def test_moving(pool: RankPool, mode: str):
    pool.run(_move, mode)


def _in_stream_order(mode: str) -> float:
    """Long computations before and after: nobody reads what is not there yet."""
    elastic_or_not(True)
    try:

        def step(x: Any) -> Any:
            for _ in range(4):
                x = x @ x
                x = x / jnp.abs(x).max()
                x = hvd.allreduce(x, op=hvd.Average)
            return x

        def step_without(x: Any) -> Any:
            for _ in range(4):
                x = x @ x
                x = x / jnp.abs(x).max()
            return x

        x = jax.random.normal(jax.random.key(0), (2048, 2048))
        expected = np.asarray(jax.jit(step_without)(x))
        run = compiled(mode, step)
        results = [run(x) for _ in range(5)]  # without looking at any in between
        return max(float(np.abs(np.asarray(each) - expected).max()) for each in results)
    finally:
        elastic_or_not(False)


@pytest.mark.parametrize("mode", MODES)
def test_in_stream_order(pool: RankPool, mode: str):
    for difference in pool.run(_in_stream_order, mode):
        assert difference < 1e-3


def _memory_is_used_again() -> bool:
    """JAX and torch free and allocate between collectives; nothing is overwritten."""
    elastic_or_not(True)
    try:
        step = jax.jit(lambda x: hvd.allreduce(x * 2, op=hvd.Average))
        for number in range(20):
            x = jnp.full((1 << 20,), float(number))
            made = [hvd.allreduce(x), step(x), hvd.allgather(x)]
            noise = [jnp.full((1 << 20,), -1.0) for _ in range(3)]
            del x
            torch.empty(1 << 22, device="cuda").fill_(-2)
            assert bool((made[0] == number).all())
            assert bool((made[1] == 2 * number).all())
            assert bool((made[2] == number).all())
            del noise
        return True
    finally:
        elastic_or_not(False)


def test_memory_is_used_again(pool: RankPool):
    assert all(pool.run(_memory_is_used_again))


def _train(jit: bool) -> list[np.ndarray]:
    from tests.jax.test_optimizer import ROWS, data, loss, model, train

    rank, size = hvd.rank(), hvd.size()
    x, y = data()
    if size > 1:
        x, y = x[rank * ROWS : (rank + 1) * ROWS], y[rank * ROWS : (rank + 1) * ROWS]
    params = hvd.broadcast_parameters(model(rank), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optax.adam(0.05))
    elastic_or_not(True)
    try:
        trained = train(optimizer, params, x, y, jit, jax.value_and_grad(loss))
    finally:
        elastic_or_not(False)
    on_gpu(*jax.tree.leaves(trained))
    return jax.tree.map(np.asarray, trained)


@pytest.mark.parametrize("jit", [False, True])
def test_training(pool: RankPool, jit: bool):
    from tests.jax.test_optimizer import alone

    outcomes = pool.run(_train, jit)
    for found in outcomes:
        jax.tree.map(np.testing.assert_array_equal, found, outcomes[0])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, np.asarray(b), rtol=1e-2, atol=1e-3),
            found,
            alone(),
        )


def _state() -> list[Any]:
    state = hvd.elastic.JaxState(params={"w": jnp.arange(4.0)}, step=1)
    state.params = {"w": state.params["w"] + 1}
    state.restore()
    on_gpu(state.params["w"])
    state.sync()
    on_gpu(state.params["w"])
    return state.params["w"].tolist()


def test_elastic_state(pool: RankPool):
    assert pool.run(_state) == [[0.0, 1.0, 2.0, 3.0]] * pool.size


def _errors() -> str:
    step = jax.jit(lambda x: hvd.allreduce({"a" if hvd.rank() else "b": x}).popitem()[1].sum())
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        step(jnp.ones(2)).item()
    return str(error.value)


def test_errors_in_programs(pool: RankPool):
    if pool.size == 1:
        pytest.skip("needs two ranks")
    for message in pool.run(_errors):
        assert "mismatched tree between ranks" in message
