"""docs/spark_estimators.md: what it tells people to write runs on the cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import check_links
from tests.spark.parquet import PATIENCE

pytestmark = pytest.mark.timeout(PATIENCE)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "spark_estimators.md"


@pytest.fixture(scope="module")
def ran(spark: Any) -> dict[str, Any]:
    page = PAGE.read_text()
    namespace: dict[str, Any] = {"__name__": "page"}
    for found in re.finditer(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        lines_before = page[: found.start(1)].count("\n")  # tracebacks point into the page
        exec(compile("\n" * lines_before + found[1], str(PAGE), "exec"), namespace)
    return namespace


def test_what_the_blocks_come_to(ran: dict[str, Any]):
    losses = [epoch["train"]["loss"] for epoch in ran["history"]]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
    assert isinstance(ran["first"].guess, float)
    assert ran["loaded"].getHistory() == ran["history"]
    assert ran["again"].getHistory()[0]["train"]["loss"] < losses[0], "it was resumed"
    assert len(ran["from_parquet"].getHistory()) == 1
    assert "batch_size: rows in a batch of one process" in ran["explained"]
    assert ran["processes"] == 2
    assert ran["seen"] == 200


def test_links_lead_somewhere():
    check_links(PAGE)
