"""Ranks for each Keras: pools of two, one for every flavour, that stay for the session.

Where TensorFlow is not installed this directory is not collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import rank_process
from tests.keras.flavours import FLAVOURS
from tests.ranks import RankPool
from tests.tensorflow.conftest import HAS_TENSORFLOW

collect_ignore_glob = [] if HAS_TENSORFLOW else ["test_*.py"]

if HAS_TENSORFLOW and "tests.keras.without_keras" not in rank_process.PRELOAD:
    rank_process.PRELOAD.append("tests.keras.without_keras")


class PatientPool(RankPool):
    """Importing a Keras and compiling a model take their time on a machine that is busy."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
        return super().run(fn, *args, timeout=timeout)


@pytest.fixture(scope="session")
def keras_pools() -> Iterator[dict[str, RankPool]]:
    """Two ranks of each flavour, which have called `hvd.init()`; started when first used."""
    pools = {name: PatientPool(2, env) for name, env in FLAVOURS.items()}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=FLAVOURS)
def keras_pool(request: pytest.FixtureRequest, keras_pools: dict[str, RankPool]) -> RankPool:
    """Two ranks of every flavour in turn."""
    return keras_pools[request.param]


@pytest.fixture(params=["tensorflow", "torch", "jax"])
def keras3_pool(request: pytest.FixtureRequest, keras_pools: dict[str, RankPool]) -> RankPool:
    """Two ranks of every backend of Keras 3 in turn."""
    return keras_pools[request.param]


@pytest.fixture(params=["tensorflow", "tf_keras"])
def tensorflow_keras_pool(
    request: pytest.FixtureRequest, keras_pools: dict[str, RankPool]
) -> RankPool:
    """Two ranks of either tf.keras."""
    return keras_pools[request.param]
