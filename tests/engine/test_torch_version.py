"""One warning about a torch that is too old or too new, and it is tried all the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from horovod.engine.torch_version import NEWEST, OLDEST, complaint

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "age"),
    [
        ("2.3.1", "older"),
        ("1.13.1+cu117", "older"),
        (f"{OLDEST}.0", None),
        (f"{NEWEST}.7+cpu", None),
        ("2.16.0", "newer"),
        ("2.16.0.dev20261101", "newer"),
        ("3.0", "newer"),
    ],
)
def test_versions_outside_the_range_are_named_with_the_range(version: str, age: str | None):
    words = complaint(version)
    if age is None:
        assert words is None
    else:
        assert words is not None
        assert f"torch {version} is {age} than" in words
        assert f"{OLDEST} to {NEWEST}" in words


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_it_is_said_once_and_still_tried(rank: str, times: int):
    program = (
        "import os, torch; torch.__version__ = '9.9.9'; rank = os.environ.pop('HOROVOD_RANK')\n"
        "os.environ['RANK'] = rank\n"
        "import horovod.torch as hvd, horovod.engine.runtime\n"
        "del os.environ['RANK']; hvd.init(); print(float(hvd.allreduce(torch.ones(1))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOROVOD_RANK": rank},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "1.0\n", done.stderr
    assert done.stderr.count("torch 9.9.9 is newer than") == times


def test_what_is_declared_is_what_is_tested():
    declared = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^pytorch = \["torch>=' + re.escape(OLDEST) + '"', declared, re.MULTILINE)
    tested = re.search(r"^VERSIONS\s*[:?]?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tested is not None
    versions = tested[1].split()
    assert versions[0].startswith(f"{OLDEST}.")
    assert versions[-1].startswith(f"{NEWEST}.")
    constraints = (ROOT / "constraints.txt").read_text()  # on the newest that has a CPU build
    assert any(f"torch=={version}\n" in constraints for version in versions)
