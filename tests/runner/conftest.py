"""A Slurm for the tests of the launcher."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm import Slurm, available


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Slurm]:
    """Three nodes that live as long as the test session."""
    reason = available()
    if reason:
        pytest.skip(reason)
    with Slurm(3) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: Slurm) -> Iterator[Slurm]:
    """The cluster, without what a test that failed left in it."""
    yield slurm_cluster
    slurm_cluster.cancel_everything()
