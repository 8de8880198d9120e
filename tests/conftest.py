"""Fixtures for the whole suite: pools of ranks that live as long as the test session."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest

from tests.ranks import RankPool

hypothesis.settings.register_profile("any machine", deadline=None)  # however busy it is
hypothesis.settings.load_profile("any machine")


def pytest_configure() -> None:
    """A shell ignores Ctrl-C for what it runs in the background, and so would all our jobs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _pool(size: int) -> Iterator[RankPool]:
    pool = RankPool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool2() -> Iterator[RankPool]:
    """Two ranks that have called `hvd.init()`."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def pool3() -> Iterator[RankPool]:
    """Three ranks that have called `hvd.init()`."""
    yield from _pool(3)


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    """Four ranks that have called `hvd.init()`."""
    yield from _pool(4)
