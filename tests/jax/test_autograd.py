"""Gradients of the collectives: upstream's conventions, the same at once and compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import horovod.jax as hvd
from tests.ranks import RankPool


def _gradients(collective: Any, x: Any) -> list[Any]:
    """d/dx of sum((rank + 1) * collective(x)), at once and compiled, which must be the same."""
    rank = hvd.rank()

    def loss(x: Any) -> Any:
        return sum(((rank + 1) * leaf).sum() for leaf in jax.tree.leaves(collective(x)))

    at_once, compiled = jax.grad(loss)(x), jax.jit(jax.grad(loss))(x)
    jax.tree.map(np.testing.assert_allclose, at_once, compiled)
    return jax.tree.map(lambda leaf: leaf.tolist(), at_once)


def _all_gradients() -> dict[str, Any]:
    x = jnp.arange(4.0) + hvd.rank()
    tree = {"a": x, "b": (x[:2],)}
    return {
        "sum": _gradients(lambda x: hvd.allreduce(x, op=hvd.Sum), x),
        "average": _gradients(hvd.allreduce, x),
        "scaled": _gradients(lambda x: hvd.allreduce(x, op=hvd.Sum, postscale_factor=2.0), x),
        "tree": _gradients(hvd.allreduce, tree),
        "compressed": _gradients(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), x),
        "allgather": _gradients(hvd.allgather, x),
        "broadcast": _gradients(lambda x: hvd.broadcast(x, 1), x),
        "alltoall": _gradients(hvd.alltoall, x),
        "scatter": _gradients(hvd.reducescatter, x),
        "scatter_sum": _gradients(lambda x: hvd.reducescatter(x, op=hvd.Sum), x),
        "scatter_uneven": _gradients(lambda x: hvd.reducescatter(x[:3]), x),
    }


def test_gradients(jax_pool2: RankPool):
    for rank, found in enumerate(jax_pool2.run(_all_gradients)):
        # The ranks' outputs count 1 and 2: their sum is 3, their average 1.5.
        assert found["sum"] == [3.0] * 4
        assert found["average"] == [1.5] * 4
        assert found["scaled"] == [6.0] * 4
        assert found["tree"] == {"a": [1.5] * 4, "b": ([1.5] * 2,)}
        assert found["compressed"] == [1.5] * 4
        assert found["allgather"] == [1.5] * 4
        assert found["broadcast"] == ([0.0] * 4 if rank == 0 else [1.5] * 4)
        assert found["alltoall"] == [1.0, 1.0, 2.0, 2.0]
        assert found["scatter"] == [1.0, 1.0, 2.0, 2.0]
        assert found["scatter_sum"] == [2.0, 2.0, 4.0, 4.0]
        assert found["scatter_uneven"] == [1.0, 1.0, 2.0, 0.0]


def _penalties() -> dict[str, list[float]]:
    """d/dx of the squared norm of the gradient of sum(collective(x**3)**2), for two numbers."""
    collectives: dict[str, Any] = {
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "average": lambda x: hvd.allreduce(x, name="penalty"),
        "allgather": hvd.allgather,
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "alltoall": hvd.alltoall,
    }
    found = {}
    for name, collective in collectives.items():

        def penalty(x: Any, collective: Any = collective) -> Any:
            gradient = jax.grad(lambda x: jnp.square(collective(x**3)).sum())(x)
            return jnp.square(gradient).sum()

        x = jnp.arange(1.0, 3.0) + hvd.rank()
        at_once, compiled = jax.grad(penalty)(x), jax.jit(jax.grad(penalty))(x)
        np.testing.assert_allclose(at_once, compiled)
        found[name] = at_once.tolist()
    return found


def test_gradients_of_gradients(jax_pool2: RankPool):
    """Computed by hand from the conventions above; rank 0 has 1 and 2, rank 1 has 2 and 3."""
    first, second = jax_pool2.run(_penalties)
    assert first == {
        "sum": [178848.0, 17377920.0],
        "average": [11178.0, 1086120.0],
        "allgather": [252.0, 129024.0],
        "broadcast": [252.0, 129024.0],
        "alltoall": [360.0, 184320.0],
    }
    assert second == {
        "sum": [902016.0, 45450720.0],
        "average": [56376.0, 2840670.0],
        "allgather": [129024.0, 4960116.0],
        "broadcast": [0.0, 0.0],
        "alltoall": [184320.0, 7085880.0],
    }


def _uneven() -> list[Any]:
    rank = hvd.rank()

    def gathered(x: Any) -> Any:
        return (hvd.allgather(x) * jnp.arange(3.0)).sum()

    def exchanged(x: Any) -> Any:
        output, _ = hvd.alltoall(x, splits=[1, 1])  # a third row stays here
        return ((rank + 1) * output).sum()

    rows = jax.grad(gathered)(jnp.ones(rank + 1))
    sent = jax.grad(exchanged)(jnp.ones(3))
    return [rows.tolist(), sent.tolist()]


def test_gradients_of_uneven_rows(jax_pool2: RankPool):
    assert jax_pool2.run(_uneven) == [
        [[0.0], [1.0, 2.0, 0.0]],
        [[1.0, 2.0], [1.0, 2.0, 0.0]],
    ]


def _mixed() -> list[Any]:
    """A tree with integers, whose gradient JAX calls float0."""
    tree = {"w": jnp.ones(2), "n": jnp.int32([3])}

    def loss(tree: Any) -> Any:
        reduced = hvd.allreduce(tree, op=hvd.Sum)
        return (reduced["w"] * reduced["n"]).sum()

    found = jax.jit(jax.grad(loss, allow_int=True))(tree)
    again = hvd.allreduce(found, op=hvd.Sum)  # what has no gradient stays as it is
    assert again["n"].dtype == jax.dtypes.float0
    return [found["w"].tolist(), again["w"].tolist()]


def test_integers_have_no_gradient(jax_pool2: RankPool):
    assert jax_pool2.run(_mixed) == [[[12.0] * 2, [24.0] * 2]] * 2


def _checkpointed() -> float:
    def loss(x: Any) -> Any:
        return (jax.checkpoint(lambda y: hvd.allreduce(jnp.sin(y)) ** 2)(x)).sum()

    x = jnp.float32(hvd.rank())
    at_once, compiled = jax.grad(loss)(x), jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(at_once, compiled, rtol=1e-6)
    return compiled.item()


def test_checkpointing_repeats_the_collective(jax_pool2: RankPool):
    average = np.sin(1.0) / 2
    for rank, found in enumerate(jax_pool2.run(_checkpointed)):
        np.testing.assert_allclose(found, 2 * average * np.cos(rank), rtol=1e-5)


def _forward_mode() -> None:
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(hvd.allreduce, (jnp.ones(2),), (jnp.ones(2),))


def test_forward_derivatives_are_refused(jax_pool2: RankPool):
    jax_pool2.run(_forward_mode)
