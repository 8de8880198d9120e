"""The dashboard of jobs on Ray: HOROVOD_DASHBOARD in the environment of the executor's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from ray.train import RunConfig, ScalingConfig

from horovod.ray import RayExecutor
from horovod.ray.train import HorovodConfig, HorovodTrainer
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


def test_a_trainer(tmp_path: Path):
    """Ray Train's controller serves the page; its variables come with the configuration."""
    page = tmp_path / "page.html"
    variables = {"HOROVOD_DASHBOARD": ":0", "HOROVOD_DASHBOARD_SAVE": str(page)}
    HorovodTrainer(
        train,
        horovod_config=HorovodConfig(timeout_s=300, env_vars=variables),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
    assert check(page, 2)["job"]["title"] == "horovod.ray"
