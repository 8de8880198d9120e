"""Charts, drawings and badges: they are fresh, and every number in the charts was measured."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs" / "site"))

import badges  # noqa: E402
import charts  # noqa: E402
import drawings  # noqa: E402

MEASURED = charts.SOURCE.read_text()


@pytest.mark.parametrize("module", [badges, charts, drawings])
def test_the_files_are_fresh(module):
    there = {path.name: path.read_text() for path in module.TARGET.iterdir()}
    assert there == module.files(), f"run python docs/site/{module.__name__}.py"


@pytest.mark.parametrize("name", charts.charts(MEASURED))
def test_every_number_was_measured(name: str):
    """Those of the axis have no point and no unit; sizes are those of the tables."""
    svg = charts.charts(MEASURED)[name].svg("light")
    shown = re.findall(r">([\d.]+)(?: s)?</text>", svg)
    values = [number for number in shown if number not in ("0.1", "1", "10", "100")]
    assert [number for number in values if not re.search(rf"\b{number}\b", MEASURED)] == []
    assert values or name in ("collectives", "network")


def test_intervals_are_read_in_each_of_their_forms():
    assert charts.ratio("", "1.95 ± 0.03") == charts.Ratio("", 1.95, 1.92, 1.98)
    assert charts.ratio("", "2.22 (2.16 to 2.31)") == charts.Ratio("", 2.22, 2.16, 2.31)
    assert charts.ratio("", "2.72") == charts.Ratio("", 2.72)


def test_a_table_that_is_gone_is_noticed():
    with pytest.raises(ValueError, match="there is no table"):
        charts.charts(MEASURED.replace("| DDP / ours |", "| faster |"))
