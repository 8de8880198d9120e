"""docs/troubleshooting.md: every message that it quotes is one that the source can say."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.docs.pages import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VARIES = "…"


def quoted() -> list[str]:
    """The messages: what stands first in a row of a table of messages, or alone in a block."""
    found = [line for block, _ in blocks(PAGE, "text") for line in block.splitlines()]
    for table in re.findall(r"^\| Message .*?(?=\n\n|\Z)", PAGE.read_text(), re.DOTALL | re.M):
        rows = table.splitlines()[2:]
        found += [re.match(r"\| `([^`]+)` \| \S", row)[1] for row in rows]  # type: ignore[index]
    return found


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else VARIES for part in node.values
        )
    return None


@functools.cache
def spoken() -> list[str]:
    """Every text of the package, with a mark for what is filled in."""
    texts = []
    for path in (ROOT / "horovod").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = _text(node) if isinstance(node, ast.expr) else None
            if text and (" " in text or VARIES in text):
                texts.append(text)
    return texts


def test_every_message_exists():
    texts = spoken()
    messages = quoted()
    assert len(messages) > 70
    # A mark at either end also stands for nothing.
    missing = [m for m in messages if not any(m.strip(VARIES).strip() in text for text in texts)]
    assert missing == []


def test_a_message_that_nobody_says_is_found():
    assert not any("ranks have waited … years" in text for text in spoken())


def test_messages_are_quoted_once():
    assert len(quoted()) == len(set(quoted()))
