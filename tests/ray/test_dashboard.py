"""The dashboard of jobs on Ray: HOROVOD_DASHBOARD in the environment of the executor's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from horovod.ray import RayExecutor
from tests.observe.dashboard.training import check, train

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(900)]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOROVOD_DASHBOARD", ":0")
    monkeypatch.setenv("HOROVOD_DASHBOARD_SAVE", str(tmp_path / "page.html"))
    return tmp_path / "page.html"


def call(**how: Any) -> list[int]:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), **how)
    executor.start()
    try:
        found: list[int] = executor.run(train)
    finally:
        executor.shutdown()
    return found


def test_a_fixed_job(page: Path, capfd: pytest.CaptureFixture[str]):
    assert call(num_workers=2) == [0, 1]
    assert "horovod.ray: dashboard: http://127.0.0.1:" in capfd.readouterr().err
    check(page, 2)


def test_an_elastic_job(page: Path):
    assert call(min_workers=2, max_workers=2) == [0, 1]
    board = check(page, 2)
    assert board["job"]["elastic"]
    assert board["job"]["ended"]["status"] == 0
    assert any("formed with 2 workers" in event["text"] for event in board["events"])
