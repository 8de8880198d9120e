"""docs/jax.md: what it tells people to write runs, and does what the page says."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

from horovod.runner.options.arguments import parse_args
from tests.docs.pages import check_home_sample
from tests.ranks import run_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _run_page(rank: int, size: int, page: str) -> list[dict[str, Any]]:
    """Run the page's blocks as one program; what there is after each."""
    import jax
    import numpy as np

    namespace: dict[str, Any] = {"__name__": "page"}
    states = []
    for found in re.finditer(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        # Blank lines before the code: tracebacks point into the page.
        code = "\n" * page[: found.start(1)].count("\n") + found[1]
        exec(compile(code, str(DOCS / "jax.md"), "exec"), namespace)
        wanted = ("metrics", "total", "rows", "average", "centred", "normalised", "last", "mine")
        values = {key: namespace[key] for key in wanted if key in namespace}
        state = jax.tree.map(lambda x: np.asarray(x).tolist(), values)
        state["params"] = jax.tree.map(lambda x: np.asarray(x).tolist(), namespace["params"])
        state["section"] = re.findall(r"^## (.*)$", page[: found.start()], re.MULTILINE)[-1]
        states.append(state)
    return states


def test_the_page():
    page = (DOCS / "jax.md").read_text()
    first, second = run_ranks(_run_page, 2, page, timeout=280)
    for mine, other in zip(first, second, strict=True):
        assert mine["params"] == other["params"], mine["section"]
    trained = {
        after["section"]
        for before, after in itertools.pairwise(first)
        if after["params"] != before["params"]
    }
    assert trained == {
        "Accumulating gradients",
        "Sending fewer bytes",
        "Local steps",
        "Without an optimizer of optax",
        "Elastic training",
    }
    last = first[-1]
    assert last["metrics"] == second[-1]["metrics"]
    assert last["total"] == {"a": [1, 1, 1], "b": [2.0]}
    assert len(last["rows"]) == 3
    assert last["centred"] == [-2.0, -1.0, 0.0, 1.0]
    assert last["last"] == 1
    assert (last["mine"], second[-1]["mine"]) == (0.0, 1.0)


def test_commands_and_links():
    page = (DOCS / "jax.md").read_text()
    commands = re.findall(r"^    (horovodrun .*)$", page, re.MULTILINE)
    assert commands
    for command in commands:
        assert parse_args(shlex.split(command)[1:]).num_proc == 2
    for target in re.findall(r"\]\(([^)]+)\)", page):
        assert (DOCS / target.partition("#")[0]).is_file(), target


def test_the_sample_of_the_home_page():
    check_home_sample("JAX")
