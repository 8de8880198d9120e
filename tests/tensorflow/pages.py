"""Running the Python blocks of a page of the documentation on two ranks."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
HANG = 280.0  # seconds; no page takes a tenth of it

States = list[dict[str, Any]]  # of a rank, one for each block


def run_page(
    name: str, folder: Path, env: dict[str, str], replace: tuple[str, str] | None = None
) -> tuple[States, States]:
    """What each rank has come to after each block. After each, both have the same model."""
    page = (DOCS / name).read_text()
    if replace:
        assert page.count(replace[0]) == 1
        page = page.replace(*replace)
    first, second = run_ranks(_run_page, 2, name, page, str(folder), env=env, timeout=HANG)
    assert len(first) == page.count("```python") > 5
    for mine, other in zip(first, second, strict=True):
        assert mine["checksum"] == other["checksum"], mine["section"]
    return first, second


def sections_that_train(states: States) -> set[str]:
    """The sections that leave another model than they found."""
    return {
        after["section"]
        for before, after in itertools.pairwise(states)
        if after["checksum"] != before["checksum"]
    }


def _run_page(rank: int, size: int, name: str, page: str, folder: str) -> States:
    """Run the page's blocks as one program."""
    os.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "page"}
    states = []
    for found in re.finditer(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        # Blank lines before the code: tracebacks point into the page.
        code = "\n" * page[: found.start(1)].count("\n") + found[1]
        exec(compile(code, str(DOCS / name), "exec"), namespace)
        digest = hashlib.sha256()
        for weight in namespace["model"].get_weights():
            digest.update(weight.tobytes())
        if "table" in namespace:
            digest.update(namespace["table"].numpy().tobytes())
        state = {k: v for k, v in namespace.items() if isinstance(v, (int, float, str))}
        state["section"] = re.findall(r"^## (.*)$", page[: found.start()], re.MULTILINE)[-1]
        state["checksum"] = digest.hexdigest()
        if "history" in namespace:
            state["fitted"] = namespace["history"].history["accuracy"][-1]
        if "keras" in namespace:
            state["backend"] = namespace["keras"].backend.backend()
        states.append(state)
    namespace["hvd"].shutdown()
    return states
