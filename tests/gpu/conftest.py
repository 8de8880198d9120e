"""Skips this folder where there is no GPU, and has the pools of ranks that its tests share."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.accelerators import gpu_count, on_cpu
from tests.gpu.pools import GpuPools

NO_GPU = "needs a GPU for torch"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "killing: ends processes that use a GPU, or breaks a context; not under MPS"
    )


@pytest.fixture(scope="session", autouse=True)
def _gpu_or_skip() -> None:
    if not gpu_count() and not on_cpu():
        pytest.skip(NO_GPU)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say where there is no GPU once for the folder, not for each of its tests."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and NO_GPU in report.longrepr[2]:
        report.longrepr = (str(Path(__file__).parent), None, report.longrepr[2])
    return report


@pytest.fixture(scope="session")
def gpus() -> Iterator[GpuPools]:
    """Ranks that have called `hvd.init()`, each with a GPU or a part of one."""
    pools = GpuPools()
    yield pools
    pools.close()
