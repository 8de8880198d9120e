"""Ranks that have MXNet, where it can be used; elsewhere this directory is not collected.

MXNet starts threads when it is imported, so that ranks import it themselves instead of inheriting
it from the fork server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.bindings.frameworks import FRAMEWORKS
from tests.ranks import RankPool

REASON = FRAMEWORKS["mxnet"].unusable()

collect_ignore_glob = ["test_[!u]*.py"] if REASON else []


class PatientPool(RankPool):
    """Importing MXNet takes its time."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
        return super().run(fn, *args, timeout=timeout)


@pytest.fixture(scope="session")
def mx_pool2() -> Iterator[RankPool]:
    """Two ranks that have MXNet and have called `hvd.init()`."""
    pool = PatientPool(2)
    yield pool
    pool.close()
