"""Fixtures for the whole suite: pools of ranks that live as long as the test session."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest

from tests.effort import examples
from tests.missing import summarise
from tests.ranks import RankPool

# How long an example takes says something about the machine, not about the code.
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")


def pytest_configure() -> None:
    """A shell ignores Ctrl-C for what it runs in the background, and so would all our jobs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# These take long, file by file. They begin first, so that no worker of pytest-xdist is left alone
# with one of them in the end.
_LONG = ("multihost/", "faults/", "examples/", "elastic/", "docs/", "dashboard/", "transport/")
_LONG += ("test_benchmarks.py", "test_scaling_model.py")
_LONG += ("tensorflow/test_examples.py", "jax/test_examples.py", "keras/test_docs.py")
_LONG += ("keras/test_elastic.py", "keras/test_examples.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(tuple(f"tests/{d}" for d in _LONG)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Before pytest lists what was skipped."""
    for line in summarise(terminalreporter.stats):
        terminalreporter.write_line(line)


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
