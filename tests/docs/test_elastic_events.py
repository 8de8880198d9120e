"""docs/elastic.md names every event of the status file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _events() -> set[str]:
    found = set()
    for path in (ROOT / "horovod" / "runner" / "elastic").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            function = getattr(node, "func", None)
            if isinstance(function, ast.Attribute) and function.attr in ("note", "announce"):
                index = 0 if function.attr == "note" else 1
                if len(node.args) > index and isinstance(node.args[index], ast.Constant):
                    found.add(node.args[index].value)
    return found


def test_the_table_has_all_of_them():
    events = _events()
    assert len(events) > 10
    named = set(re.findall(r"`([a-z ]+)`", (ROOT / "docs" / "elastic.md").read_text()))
    assert events - named == set()
