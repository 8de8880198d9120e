"""An elastic job over three hosts, of which one after another fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.elastic_chaos_hosts import KINDS, draw
from tests.multihost.ssh_hosts import ROOT, available

PROGRAM = ROOT / "benchmarks" / "elastic_chaos_hosts.py"


def test_one_fault_of_each_kind_leaves_equal_models_and_nothing_else(tmp_path: Path):
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    pytest.importorskip("sklearn")
    options = ["--faults", str(len(KINDS)), "--per-host", "1", "--seed", "1"]
    outcome = subprocess.run(
        [sys.executable, str(PROGRAM), *options],
        cwd=tmp_path,  # where it keeps the log of a job that failed
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert outcome.returncode == 0, outcome.stdout + logs
    for kind in KINDS:
        assert f"{kind!r}: 1" in outcome.stdout, outcome.stdout


def test_faults_are_drawn_from_the_seed():
    def first(seed: int) -> list[object]:
        return [fault for fault, _ in zip(draw(seed, 1.0), range(40), strict=False)]

    assert first(1) == first(1) != first(2)
    assert all(sum(f.kind == kind for f in first(3)) == 10 for kind in KINDS)
