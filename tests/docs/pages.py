"""What holds for every page of the documentation: commands parse, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from horovod.runner.arguments import parse_args


def check_commands(page: Path, count: int) -> None:
    """There are `count` commands with horovodrun, for two processes, and it understands them."""
    commands = re.findall(r"^    (horovodrun .*)$", page.read_text(), re.MULTILINE)
    assert len(commands) == count
    for command in commands:
        assert parse_args(shlex.split(command)[1:]).num_proc == 2


def check_links(page: Path) -> None:
    text = page.read_text()
    anchors = {
        "#" + re.sub(r"[^a-z0-9 ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.*)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target in anchors or (page.parent / target).is_file(), target
