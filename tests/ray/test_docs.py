"""docs/ray.md: what it tells people to write runs, as one program, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import check_links
from tests.ray.conftest import ROOT

pytestmark = pytest.mark.timeout(900)

PAGE = ROOT / "docs" / "ray.md"


def test_all_blocks_run(cluster: Any, tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks) + '\nprint("to the end")\n')
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert "to the end" in done.stdout, done.stdout + done.stderr


def test_links():
    check_links(PAGE)
