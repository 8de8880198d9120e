"""The pages for contributors name files that exist, and no errand needs more than ten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
_PATH = re.compile(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|toml))`")
ERRANDS = re.findall(
    r"^\| (\w.*?) \| (.*) \|$", ARCHITECTURE.split("## Four errands")[1].split("\n## ")[0], re.M
)[1:]


def exists(path: str) -> bool:
    return (ROOT / path).is_file() or (ROOT / "horovod" / path).is_file()


@pytest.mark.parametrize("page", [ARCHITECTURE, CONTRIBUTING], ids=["architecture", "contributing"])
def test_files_are_there(page: str):
    named = {path for path in _PATH.findall(page) if "yours" not in path}
    assert len(named) > 10
    assert sorted(path for path in named if not exists(path)) == []


@pytest.mark.parametrize(("errand", "files"), ERRANDS, ids=[errand for errand, _ in ERRANDS])
def test_an_errand_needs_at_most_ten_files(errand: str, files: str):
    assert 1 <= len(_PATH.findall(files)) <= 10


def test_all_errands_are_seen():
    assert len(ERRANDS) == 4
