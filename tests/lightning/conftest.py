"""Ranks that have Lightning, where it is installed; elsewhere this directory is not collected.

The fork server imports Lightning once, and so ranks start in milliseconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests import rank_process
from tests.ranks import RankPool

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None

collect_ignore_glob = [] if HAS_LIGHTNING else ["test_*.py"]

if HAS_LIGHTNING and "lightning.pytorch" not in rank_process.PRELOAD:
    rank_process.PRELOAD += ["lightning.pytorch", "horovod.lightning.strategy"]
    rank_process.PRELOAD += ["sklearn.datasets", "sklearn.model_selection"]  # of the examples


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two ranks that have Lightning and have called `hvd.init()`."""
    pool = RankPool(2, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    pool.run(int, timeout=300)  # the first of all starts the fork server, which takes its time
    yield pool
    pool.close()
