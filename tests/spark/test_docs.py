"""docs/spark.md: what it tells people to write about functions runs, and does what it says."""

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
PAGE = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


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
