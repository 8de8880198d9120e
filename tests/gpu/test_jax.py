"""horovod.jax on ranks that talk through NCCL, where JAX has a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.accelerators import gpu_count, nccl_environment, on_cpu
from tests.gpu import LIMIT
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"]
DTYPES += ["complex64"]
MODES = ["eager", "jit"]
STEPS = 5


def environment(size: int) -> Callable[[int], dict[str, str]]:
    """JAX takes the first device that it sees, so each rank sees its own."""
    of_rank = nccl_environment(size)
    settings = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # or the first rank takes all memory
        "JAX_DEFAULT_MATMUL_PRECISION": "float32",  # or products are rounded to a few digits
    }
    if not on_cpu():
        return lambda rank: {
            **of_rank(rank),
            **settings,
            "CUDA_VISIBLE_DEVICES": str(rank % gpu_count()),
        }
    return lambda rank: {**of_rank(rank), **settings, "JAX_PLATFORMS": "cpu"}


def platform() -> str:
    import jax

    return jax.default_backend()


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    ranks = RankPool(request.param, environment(request.param))
    try:
        if set(ranks.run(platform, timeout=LIMIT)) != {"cpu" if on_cpu() else "gpu"}:
            pytest.skip("JAX has no GPU")
        yield ranks
    finally:
        ranks.close()


def compiled(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    return jax.jit(function) if mode == "jit" else function


def value(dtype: str, rank: int, rows: int = 6) -> Any:
    """Small whole numbers of a rank, exact in every type."""
    import jax.numpy as jnp

    numbers = (np.arange(rows * 2).reshape(rows, 2) * (rank + 1)) % 5
    return jnp.asarray(numbers).astype(dtype)


def collected(mode: str) -> None:
    """Every collective of every type, checked where it runs."""
    import jax

    with jax.enable_x64(True):
        for dtype in DTYPES:
            collected_of(dtype, mode)


def collected_of(dtype: str, mode: str) -> None:
    """The same for one type."""
    import horovod.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    everybody = [value(dtype, each) for each in range(size)]
    wide = [np.asarray(each.astype("complex128")) for each in everybody]

    def step(x: Any) -> tuple[Any, ...]:
        return (
            hvd.allreduce(x, op=hvd.Sum),
            hvd.allreduce({"a": x, "b": x[:1]}, op=hvd.Sum)["b"],
            hvd.allgather(x),
            hvd.broadcast(x, size - 1),
            hvd.alltoall(x),
            hvd.reducescatter(x, op=hvd.Sum),
        )

    for _ in range(2):
        found = compiled(mode, step)(everybody[rank])
        for each in found:
            assert {device.platform for device in each.devices()} == {platform()}
            assert str(each.dtype) == dtype
        reduced, part, gathered, sent, exchanged, scattered = (
            np.asarray(each.astype("complex128")) for each in found
        )
        total, share = sum(wide), 6 // size
        mine = slice(rank * share, (rank + 1) * share)
        np.testing.assert_array_equal(reduced, total)
        np.testing.assert_array_equal(part, total[:1])
        np.testing.assert_array_equal(gathered, np.concatenate(wide))
        np.testing.assert_array_equal(sent, wide[-1])
        np.testing.assert_array_equal(exchanged, np.concatenate([w[mine] for w in wide]))
        np.testing.assert_array_equal(scattered, total[mine])


@pytest.mark.parametrize("mode", MODES)
def test_collectives(pool: RankPool, mode: str):
    pool.run(collected, mode, timeout=LIMIT)


def in_stream_order(mode: str) -> float:
    """Long computations before and after: nobody reads what is not there yet."""
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    def computed(x: Any, reduces: bool) -> Any:
        for _ in range(4):
            x = x @ x
            x = x / jnp.abs(x).max()
            x = hvd.allreduce(x, op=hvd.Average) if reduces else x
        return x

    x = jax.random.normal(jax.random.key(0), (1024, 1024), dtype="float32")
    expected = np.asarray(jax.jit(lambda x: computed(x, False))(x))
    run = compiled(mode, lambda x: computed(x, True))
    results = [run(x) for _ in range(4)]  # without looking at any in between
    return max(float(np.abs(np.asarray(each) - expected).max()) for each in results)


@pytest.mark.parametrize("mode", MODES)
def test_in_stream_order(pool: RankPool, mode: str):
    for difference in pool.run(in_stream_order, mode, timeout=LIMIT):
        assert difference < 1e-3


def trained(mode: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradient descent on everybody's rows, and on all of them here."""
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    rows = jax.random.normal(jax.random.key(1), (4 * size, 8), dtype="float32")
    targets = jnp.sin(rows.sum(1, keepdims=True))

    def loss(params: Any, x: Any, y: Any) -> Any:
        hidden = jnp.tanh(x @ params["first"])
        return jnp.square(hidden @ params["last"] - y).mean()

    def start(seed: int) -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(seed))
        return {
            "first": jax.random.normal(keys[0], (8, 16), dtype="float32"),
            "last": jax.random.normal(keys[1], (16, 1), dtype="float32"),
        }

    def update(gradient: Any, params: Any, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient(params, x, y))

    together = compiled(mode, lambda p, x, y: update(hvd.grad(loss), p, x, y))
    alone = jax.jit(lambda p, x, y: update(jax.grad(loss), p, x, y))
    mine = slice(4 * rank, 4 * rank + 4)
    params, own = hvd.broadcast_parameters(start(rank), root_rank=0), start(0)
    for _ in range(STEPS):
        params = together(params, rows[mine], targets[mine])
        own = alone(own, rows, targets)
    return [np.asarray(p) for p in params.values()], [np.asarray(p) for p in own.values()]


@pytest.mark.parametrize("mode", MODES)
def test_training(pool: RankPool, mode: str):
    results = pool.run(trained, mode, timeout=LIMIT)
    for params, expected in results:
        for mine, theirs, right in zip(params, results[0][0], expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
            np.testing.assert_allclose(mine, right, rtol=1e-3, atol=1e-4)


def transports() -> set[str]:
    from horovod.engine.runtime import runtime

    job = runtime._job
    assert job is not None
    return {each.name for each in job.channels[0]._executor._device_transports.values()}


def test_nccl_carries_all_of_this(pool: RankPool):
    if on_cpu():
        pytest.skip("arrays are in host memory")
    pool.run(collected, "eager", timeout=LIMIT)
    assert pool.run(transports, timeout=LIMIT) == [{"NCCL"}] * pool.size
