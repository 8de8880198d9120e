"""A Slurm for the tests of the launcher."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm import Slurm, available


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Three nodes that live as long as the test session."""
    reason = available()
    if reason:
        pytest.skip(reason)
    with Slurm(3) as cluster:
        yield cluster
