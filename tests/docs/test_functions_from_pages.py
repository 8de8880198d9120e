"""Pages whose programs start ranks themselves, by `horovod.run`: they run as the page has them.

A notebook has no file that ranks could import: its cells come from standard input here, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.common.test_rendezvous import clean_environ
from tests.docs.pages import blocks
from tests.ranks import run_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
LONG = 280


def type_in(program: str, folder: Path) -> str:
    """What a Python prints that is given a program line by line."""
    done = subprocess.run(
        [sys.executable, "-"],
        input=program,
        cwd=folder,
        env=clean_environ(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_cells_of_the_page_about_notebooks(tmp_path: Path):
    cells = [code for code, _ in blocks(DOCS / "notebooks.md", "python")]
    printed = type_in("\n".join(cells), tmp_path)
    assert "[0]<stdout>:loss 0.0000" in printed
    assert re.search(r"^weights \[(1.0, ){7}1.0\]$", printed, re.MULTILINE), printed
    assert "rank 1 failed" in printed


def test_a_search_with_one_trial_after_another(tmp_path: Path):
    search, _ = blocks(DOCS / "hyperparameter_search.md", "python")[0]
    # A trial takes seconds: one will do, with a rate that learns.
    for there, instead in (("range(3)", "range(1)"), ("uniform(-4, -1)", "uniform(-1, -1)")):
        assert search.count(there) == 1
        search = search.replace(there, instead)
    printed = type_in(search, tmp_path)
    (loss,) = re.findall(r"^best of 1: rate 0.1000 with loss (\S+)$", printed, re.MULTILINE)
    assert float(loss) < 0.1


def _run_trials(rank: int, size: int) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(blocks(DOCS / "hyperparameter_search.md", "python")[1][0], namespace)
    return {name: namespace[name] for name in ("trials", "best_rate", "best_loss")}


def test_a_search_with_trials_at_the_same_time():
    first, second = run_ranks(_run_trials, 2, timeout=LONG)
    assert first == second
    assert [rate for _, rate in first["trials"]] == [0.1, 0.01]
    assert first["best_rate"] == 0.1
    assert first["best_loss"] < 0.1 < max(first["trials"])[0]
