"""Ranks that have JAX, where it is installed; elsewhere this directory is not collected.

The fork server imports JAX once, and so the pools' ranks start in milliseconds. That is safe as
long as nothing computes there: only then does JAX start threads.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import rank_process
from tests.ranks import RankPool

HAS_JAX = all(importlib.util.find_spec(name) is not None for name in ("jax", "optax", "flax"))

collect_ignore_glob = [] if HAS_JAX else ["test_*.py"]

if HAS_JAX and "horovod.jax" not in rank_process.PRELOAD:
    rank_process.PRELOAD += ["jax", "jax.numpy", "optax", "flax.linen", "flax.nnx", "horovod.jax"]
    rank_process.PRELOAD += ["sklearn.datasets", "sklearn.model_selection"]  # of the examples


class PatientPool(RankPool):
    """Compiling takes its time on a machine that is busy."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
        return super().run(fn, *args, timeout=timeout)


def jax_pool(size: int, env: dict[str, str] | None = None) -> Iterator[RankPool]:
    """For fixtures: ranks that have called `init`, in an environment with `env`."""
    pool = PatientPool(size, env)
    pool.run(int, timeout=300)  # the first of all starts the fork server, which takes its time
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def jax_pool2() -> Iterator[RankPool]:
    """Two ranks that have JAX and have called `hvd.init()`."""
    yield from jax_pool(2)


@pytest.fixture(scope="session")
def jax_pool3() -> Iterator[RankPool]:
    """Three ranks that have JAX, have called `hvd.init()` and may add process sets."""
    yield from jax_pool(3, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
