"""The dashboard of jobs on Spark: HOROVOD_DASHBOARD in the driver's environment."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import horovod.spark
from tests.observe.dashboard.training import check, saved, train

pytestmark = pytest.mark.timeout(900)  # a busy machine may take minutes to start the cluster


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOROVOD_DASHBOARD", ":0")
    monkeypatch.setenv("HOROVOD_DASHBOARD_SAVE", str(tmp_path / "page.html"))
    return tmp_path / "page.html"


def test_a_fixed_job(whole: Any, page: Path):
    errors = io.StringIO()
    assert horovod.spark.run(train, num_proc=2, stderr=errors) == [0, 1]
    assert "dashboard: http://127.0.0.1:" in errors.getvalue()
    board = check(page, 2)
    assert board["job"]["ended"]["status"] == 0
    assert board["job"]["title"] == "horovod.spark.run"


def test_an_elastic_job(whole: Any, page: Path):
    assert horovod.spark.run_elastic(train, num_proc=2) == [0, 1]
    board = check(page, 2)
    assert board["job"]["elastic"]
    assert any("formed with 2 workers" in event["text"] for event in board["events"])


def test_a_job_that_fails(whole: Any, page: Path):
    def fail() -> None:
        raise ValueError("<b>no</b>")

    with pytest.raises(ValueError, match="no"):
        horovod.spark.run(fail, num_proc=1)
    ended = saved(page)["board"]["job"]["ended"]
    assert ended["status"] == 1
    assert ended["cause"].startswith("rank 0 on ")
