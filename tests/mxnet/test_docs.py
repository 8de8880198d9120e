"""docs/mxnet.md: what it tells people to write runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mxnet.md"


def _run_page(rank: int, size: int, blocks: list[str]) -> list[Any]:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    weight = namespace["network"].weight.data().asnumpy().tolist()
    return [weight, namespace["total"].asnumpy().tolist(), len(namespace["everybody"])]


def test_the_page():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    first, second = run_ranks(_run_page, 2, blocks, timeout=280)
    assert first == second
    assert first[1:] == [[2.0, 2.0, 2.0], 2]
