"""docs/spark.md: what it tells people to write about functions runs, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from horovod.spark import conf
from tests.docs.pages import check_links

pytestmark = pytest.mark.timeout(900)  # a busy machine may take minutes to start Java
PAGE = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


@pytest.mark.usefixtures("whole")
def test_the_blocks_about_functions_run():
    text = PAGE.read_text()
    part = text[: text.index("\n## Data prepared on Spark")]
    namespace: dict[str, Any] = {"__name__": "__main__"}  # so that functions travel by value
    for found in re.finditer(r"^```python\n(.*?)^```$", part, re.DOTALL | re.MULTILINE):
        lines_before = part[: found.start(1)].count("\n")  # tracebacks point into the page
        exec(compile("\n" * lines_before + found[1], str(PAGE), "exec"), namespace)
    assert namespace["results"] == [(0, 30.0), (1, 30.0)]
    assert namespace["first"] == (0, 30.0)
    assert namespace["steps"] == [20]
    assert len(namespace["settings"]) == 3


def test_links_lead_somewhere():
    check_links(PAGE)


def test_settings_are_ones_that_spark_knows(spark: Any):
    """Spark keeps entries for them, with the defaults that we tell."""
    entries = spark.sparkContext._jvm.org.apache.spark.internal.config.ConfigEntry
    for name, default in conf.SPARK_CONF_DEFAULT_VALUES.items():
        entry = entries.findEntry(name)
        assert entry is not None, name
        told = str(entry.defaultValueString())
        assert told in (default, "<undefined>") or told.startswith("<value of"), (name, told)
    pairs = [getattr(conf, name) for name in dir(conf) if name.startswith("SPARK_CONF_")]
    names = {pair[0] for pair in pairs if isinstance(pair, tuple)}
    assert names == set(conf.SPARK_CONF_DEFAULT_VALUES)
