"""SyncBatchNorm for flax.linen and flax.nnx: like one layer on all ranks' batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import horovod.jax as hvd
from tests.ranks import RankPool

SHAPE = (3, 4, 5)  # rows of the first rank; the second has one more


def batches() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    whole = random.normal(size=(2 * SHAPE[0] + 1, *SHAPE[1:])).astype(np.float32) * 3 + 100
    return [whole[: SHAPE[0]], whole[SHAPE[0] :]]


def masks() -> list[np.ndarray]:
    return [np.random.default_rng(4).integers(0, 2, (len(x), 4, 1)).astype(bool) for x in batches()]


def with_linen(layer: Any, x: Any, mask: Any = None) -> dict[str, Any]:
    """Outputs, gradients of the sum of squares and what the layer has learnt."""
    variables = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), x)
    weights = jnp.arange(1.0, 6)

    def loss(params: Any, x: Any) -> Any:
        y, changed = layer.apply(
            {**variables, "params": params}, x, mask=mask, mutable=["batch_stats"]
        )
        return ((y * weights) ** 3).sum(), (y, changed)

    found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (y, changed)), (params, inputs) = found(variables["params"], x)
    return {"y": y, "stats": changed["batch_stats"], "params": params, "inputs": inputs}


def with_nnx(kind: Any, x: Any, mask: Any = None) -> dict[str, Any]:
    layer = kind(x.shape[-1], use_running_average=False, rngs=nnx.Rngs(0))
    weights = jnp.arange(1.0, 6)

    @nnx.jit
    def step(layer: Any, x: Any) -> Any:
        def loss(layer: Any, x: Any) -> Any:
            y = layer(x, mask=mask)
            return ((y * weights) ** 3).sum(), y

        grad = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, y), (params, inputs) = grad(layer, x)
        return y, params, inputs

    y, params, inputs = step(layer, x)
    return {
        "y": y,
        "stats": {"mean": layer.mean[...], "var": layer.var[...]},
        "params": {"bias": params.bias[...], "scale": params.scale[...]},
        "inputs": inputs,
    }


def synchronised(flavour: str, masked: bool) -> dict[str, Any]:
    x = jnp.asarray(batches()[hvd.rank()])
    mask = masks()[hvd.rank()] if masked else None
    if flavour == "linen":
        found = with_linen(hvd.linen.SyncBatchNorm(use_running_average=False), x, mask)
    else:
        found = with_nnx(hvd.nnx.SyncBatchNorm, x, mask)
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_like_one_layer_on_everything(jax_pool2: RankPool, flavour: str, masked: bool):
    whole = jnp.asarray(np.concatenate(batches()))
    mask = np.concatenate(masks()) if masked else None
    plain: Any = (
        with_linen(nn.BatchNorm(use_running_average=False, use_fast_variance=False), whole, mask)
        if flavour == "linen"
        else with_nnx(lambda *a, **k: nnx.BatchNorm(*a, use_fast_variance=False, **k), whole, mask)
    )
    first, second = jax_pool2.run(synchronised, flavour, masked)

    def close(found: Any, expected: Any) -> None:
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)

    for name in ("y", "inputs"):
        close(np.concatenate([first[name], second[name]]), plain[name])
    for found in (first, second):
        jax.tree.map(close, found["stats"], jax.tree.map(np.asarray, plain["stats"]))
    jax.tree.map(np.testing.assert_array_equal, first["stats"], second["stats"])
    total = jax.tree.map(lambda a, b: a + b, first["params"], second["params"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-3, atol=5e-2), total, plain["params"]
    )


def _evaluation() -> list[Any]:
    x = jnp.asarray(batches()[0])
    layer, plain = hvd.linen.SyncBatchNorm(), nn.BatchNorm()
    variables = layer.init(jax.random.key(0), x, use_running_average=False)
    np.testing.assert_allclose(
        layer.apply(variables, x, use_running_average=True),
        plain.apply(variables, x, use_running_average=True),
        rtol=1e-5,
    )
    assert jax.tree.structure(variables) == jax.tree.structure(
        plain.init(jax.random.key(0), x, use_running_average=False)
    )
    short = hvd.linen.SyncBatchNorm(use_running_average=False, dtype=jnp.bfloat16)
    y, _ = short.apply(variables, x.astype(jnp.bfloat16), mutable=["batch_stats"])
    ours = hvd.nnx.SyncBatchNorm(5, use_running_average=None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="pass use_running_average"):
        ours(x)
    np.testing.assert_allclose(ours(x, use_running_average=True), x, rtol=1e-4)
    return [y.dtype.name]


def test_evaluation_and_types(jax_pool2: RankPool):
    assert jax_pool2.run(_evaluation) == [["bfloat16"]] * 2
