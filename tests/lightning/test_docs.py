"""docs/lightning.md: what it tells people to write runs, and does what the page says."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import check_commands, check_home_sample, check_links
from tests.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lightning.md"


def _run_page(rank: int, size: int, page: str, folder: str) -> list[dict[str, Any]]:
    """Run the page's blocks as one program; what it has come to after each of them."""
    os.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "page"}
    states = []
    for found in re.finditer(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        lines_before = page[: found.start(1)].count("\n")  # tracebacks point into the page
        exec(compile("\n" * lines_before + found[1], str(PAGE), "exec"), namespace)
        digest = hashlib.sha256()
        for tensor in namespace["model"].state_dict().values():
            digest.update(tensor.numpy().tobytes())
        plain = {key: v for key, v in namespace.items() if isinstance(v, (int, float, str))}
        section = re.findall(r"^## (.*)$", page[: found.start()], re.MULTILINE)[-1]
        states.append({"section": section, "checksum": digest.hexdigest(), **plain})
    return states


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("page")
    return run_ranks(_run_page, 2, PAGE.read_text(), str(folder), timeout=280)


def test_every_block_leaves_the_ranks_with_the_same_model(ran: Any):
    first, second = ran
    assert len(first) == PAGE.read_text().count("```python") > 8
    for mine, other in zip(first, second, strict=True):
        assert mine["checksum"] == other["checksum"], mine["section"]


def test_what_the_blocks_found(ran: Any):
    for states in ran:
        by_section = {state["section"]: state for state in states}
        metrics, end = by_section["Metrics"], states[-1]
        assert metrics["accuracy"] > 0.8
        assert metrics["largest"] == 1.0
        assert by_section["Checkpoints"]["epochs"] == 2
        assert by_section["Fabric"]["total"] == 2.0
        assert end["steps"] == 3 * 16
    assert ran[0][-1]["accuracy"] == ran[1][-1]["accuracy"]


def test_commands_are_ones_that_horovodrun_understands():
    check_commands(PAGE, 2)


def test_links_lead_somewhere():
    check_links(PAGE)


def test_the_sample_of_the_home_page():
    check_home_sample("Lightning")
