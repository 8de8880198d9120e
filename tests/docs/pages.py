"""What holds for every page of the documentation: commands parse, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from horovod.runner.options.arguments import parse_args

# For programs that give each rank a GPU of its own, on a machine that has one, but not so many.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def check_commands(page: Path, count: int) -> None:
    """There are `count` commands with horovodrun, for two processes, and it understands them."""
    commands = re.findall(r"^    (horovodrun .*)$", page.read_text(), re.MULTILINE)
    assert len(commands) == count
    for command in commands:
        assert parse_args(shlex.split(command)[1:]).num_proc == 2


def check_links(page: Path) -> None:
    """Every link of the page leads to a file that exists, and to a title in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """What a link may name after #, as MkDocs and code hosts make it of titles."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[tuple[str, int]]:
    """The fenced blocks of a language, and the line where each begins."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(block[1], text[: block.start(1)].count("\n")) for block in found]
