"""docs/ray.md: each program that it shows runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import blocks, check_links
from tests.forked_python import forked_python
from tests.ray.conftest import ROOT

pytestmark = pytest.mark.timeout(900)

PAGE = ROOT / "docs" / "ray.md"


def test_each_block_is_a_program_that_runs(cluster: Any, tmp_path: Path):
    found = blocks(PAGE, "python")
    assert len(found) == 9

    def run(block: tuple[str, int]) -> str:
        """Run one block as a file of its own, in a folder of its own; what is wrong with it."""
        text, line = block
        folder = tmp_path / str(line)
        folder.mkdir()
        (folder / "program.py").write_text(text)
        done = subprocess.run(
            [*forked_python(), "program.py"],
            cwd=folder,
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=800,
        )
        failed = f"the block at line {line}:\n{done.stdout}{done.stderr}"
        return failed if done.returncode else ""

    with ThreadPoolExecutor(3) as pool:  # they mostly wait for Ray
        assert "\n".join(filter(None, pool.map(run, found))) == ""


def test_links():
    check_links(PAGE)
