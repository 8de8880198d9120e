"""docs/scaling.md: its script runs in its commands, and its published numbers are the files'."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest

from horovod.observe.reports.scaling import read_published, rows_of
from tests.docs.pages import blocks, check_links
from tests.forked_python import forked_python
from tests.runner.horovodrun import run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "scaling.md"


def test_links():
    check_links(PAGE)


def test_the_script_serves_a_weak_and_a_strong_study(tmp_path: Path):
    ((program, _),) = blocks(PAGE, "python")
    (tmp_path / "train.py").write_text(program)
    _, both = (text for text, _ in blocks(PAGE, "bash") if "train.py" in text)
    for line in both.splitlines():
        words = shlex.split(line)
        assert words[0] == "horovodrun"
        index = words.index("python")
        words[index : index + 1] = forked_python()
        done = run(*words[1:], cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
    for name, mode in (("scaling", "weak"), ("strong", "strong")):
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            found = list(csv.DictReader(file))
        assert [(row["ranks"], row["mode"], row["runs"]) for row in found] == [
            ("1", mode, "1"),
            ("2", mode, "1"),
        ]
        assert all(float(row["steps_per_second"]) > 0 for row in found), "the ranks report them"


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_the_published_runs_are_as_the_page_says(name: str):
    path = ROOT / "examples" / "scaling" / f"{name}_gpus.csv"
    published = read_published(str(path))
    assert published.strong
    rows = rows_of(published.runs, strong=True)
    (line,) = re.findall(rf"^\| \[.*{name}_gpus.csv\) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert line == (
        f"{rows[1].seconds:g} s | {rows[8].seconds:g} s | {rows[8].speedup:.1f} | "
        f"{rows[8].efficiency * 100:.0f} %"
    )
