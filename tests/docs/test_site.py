"""The site that `make docs` builds: what can be checked without building it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from horovod.runner.options.arguments import parse_args
from tests.docs.pages import blocks, check_links

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def _entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _entries(item)


def test_the_navigation_has_every_page_once():
    entries = list(_entries(SITE["nav"]))
    assert len(entries) == len(set(entries))
    outside = {entry for entry in entries if not (DOCS / entry).is_file()}
    assert all((ROOT / entry).is_file() for entry in outside)
    assert set(entries) - outside == set(PAGES)


def test_nothing_comes_from_other_hosts():
    assert SITE["theme"]["font"] is False
    local = [*SITE["extra_css"], *SITE["extra"]["polyfills"]]
    local += [SITE["theme"]["logo"], SITE["theme"]["favicon"]]
    assert all((DOCS / file).is_file() for file in local)
    # By this name the plugin knows that it need not fetch one from the network.
    assert any("iframe-worker" in file for file in SITE["extra"]["polyfills"])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    check_links(DOCS / page)


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("launch/")])
def test_commands_are_ones_that_horovodrun_understands(page: str):
    """Those that need no files of their own; the launch pages run theirs."""
    for block, _ in blocks(DOCS / page, "bash"):
        for command in re.findall(r"^horovodrun (.*)$", block, re.MULTILINE):
            options = parse_args(shlex.split(command, comments=True))
            assert options.check_build or options.num_proc == 2


def test_benchmark_scripts_exist():
    for block, _ in blocks(DOCS / "benchmarks.md", "bash"):
        for script in re.findall(r"benchmarks/\w+\.py", block):
            assert (ROOT / script).is_file(), script
