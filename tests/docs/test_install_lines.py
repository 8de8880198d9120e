"""What the pages tell people to install: a clone, because PyPI's ``horovod`` is the old project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / "benchmarks").rglob("*.md"),
]
# A requirement by name alone, such as horovod or 'horovod[jax]', behind any options of pip.
FROM_PYPI = re.compile(r"""pip3? install\b(?:\s+-\S+)*\s+['"]?horovod\b(?!/)""")


def _lines_from_pypi(text: str) -> list[str]:
    return [line for line in text.splitlines() if FROM_PYPI.search(line)]


@pytest.mark.parametrize(
    ("line", "is_from_pypi"),
    [
        ("pip install horovod", True),
        ("mxnet/bin/pip install -q 'horovod[mxnet]'", True),
        ("pip install --upgrade horovod==0.28.1", True),
        ("pip install '/path/to/horovod[jax]'", False),
        ("pip install -e '.[bench]'", False),
        ("pip install s3fs", False),
    ],
)
def test_the_search_tells_the_two_forms_apart(line: str, is_from_pypi: bool):
    assert bool(_lines_from_pypi(line)) is is_from_pypi


def test_no_page_installs_the_old_package_from_pypi():
    wrong = {
        str(page.relative_to(ROOT)): lines
        for page in PAGES
        # That page quotes messages: who reads one has installed Horovod, and pip keeps it.
        if page.name != "troubleshooting.md"
        and (lines := _lines_from_pypi(page.read_text(encoding="utf-8")))
    }
    assert wrong == {}
