"""docs/spark.md and docs/spark_estimators.md: what they tell people to write runs as they say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from horovod.spark import conf
from tests.docs.pages import blocks, check_links
from tests.forked_python import forked_python
from tests.spark.cluster import HANG, REPOSITORY, forked_environment

pytestmark = pytest.mark.timeout(900)  # a busy machine may take minutes to start Java
PAGE = REPOSITORY / "docs" / "spark.md"
ESTIMATORS = REPOSITORY / "docs" / "spark_estimators.md"


def test_every_block_is_a_program(tmp_path: Path):
    """Each is pasted into a new file; the page says what is printed."""
    files, expected = [], []
    for number, (block, _) in enumerate(blocks(PAGE, "python")):
        files.append(tmp_path / f"block_{number}.py")
        files[-1].write_text(block)
        expected += re.findall(r"^print\(.*\)  # ([^:\n]+)", block, re.MULTILINE)
    assert expected == ["[(0, 30.0), (1, 30.0)]", "(0, 30.0)", "[20]", "true"]
    done = subprocess.run(
        [*forked_python(), "-m", "tests.spark.paste", *map(str, files)],
        env=forked_environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize("page", [PAGE, ESTIMATORS])
def test_links_lead_somewhere(page: Path):
    check_links(page)


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


@pytest.fixture(scope="module")
def ran(spark: Any) -> dict[str, Any]:
    page = ESTIMATORS.read_text()
    namespace: dict[str, Any] = {"__name__": "page"}
    for found in re.finditer(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        lines_before = page[: found.start(1)].count("\n")  # tracebacks point into the page
        exec(compile("\n" * lines_before + found[1], str(ESTIMATORS), "exec"), namespace)
    return namespace


def test_what_the_blocks_about_estimators_come_to(ran: dict[str, Any]):
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
