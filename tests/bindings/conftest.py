"""Two ranks that all frameworks share: a process has one engine, whatever bindings it uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import rank_process
from tests.bindings.frameworks import FRAMEWORKS, Framework
from tests.ranks import RankPool

for _framework in FRAMEWORKS.values():
    if _framework.unusable() is None and _framework.package not in rank_process.PRELOAD:
        rank_process.PRELOAD += [_framework.package, f"horovod.{_framework.name}"]


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[RankPool]:
    pool = RankPool(2, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"})
    pool.run(int, timeout=300)  # starts the fork server, which imports the frameworks
    yield pool
    pool.close()


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    """Each framework in turn; skipped with the reason where it cannot be used."""
    chosen = FRAMEWORKS[request.param]
    reason = chosen.unusable()
    if reason is not None:
        pytest.skip(reason)
    return chosen
