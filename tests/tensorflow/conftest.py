"""Ranks that have TensorFlow, where it is installed; elsewhere this directory is not collected.

The fork server imports TensorFlow once, and so the pools' ranks start in milliseconds. That is
safe as long as nothing runs a TensorFlow op there: only then does TensorFlow start threads.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests import rank_process
from tests.ranks import RankPool

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None

collect_ignore_glob = [] if HAS_TENSORFLOW else ["test_*.py"]

if HAS_TENSORFLOW and "tensorflow" not in rank_process.PRELOAD:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported
    rank_process.PRELOAD += ["tensorflow", "horovod.tensorflow"]
    rank_process.PRELOAD += ["sklearn.datasets", "sklearn.model_selection"]  # of the examples


def tensorflow_pool(size: int, env: dict[str, str] | None = None) -> Iterator[RankPool]:
    """For fixtures: ranks that have called `init`, in an environment with `env`."""
    pool = RankPool(size, env)
    pool.run(int, timeout=300)  # the first of all starts the fork server, which takes its time
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tf_pool2() -> Iterator[RankPool]:
    """Two ranks that have TensorFlow and have called `hvd.init()`."""
    yield from tensorflow_pool(2)


@pytest.fixture(scope="session")
def tf_pool3() -> Iterator[RankPool]:
    """Three ranks that have TensorFlow and have called `hvd.init()`."""
    yield from tensorflow_pool(3)
