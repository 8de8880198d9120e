"""Hosts for these tests; where there can be none, the tests are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import Hosts, available


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Three hosts. A test that cuts one off heals it."""
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(3) as found:
        yield found
