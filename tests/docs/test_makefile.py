"""What `make train` leads to: the commands that it proposes work with what it has installed."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement

from horovod.runner.options.arguments import parse_args

ROOT = Path(__file__).resolve().parents[2]


def test_the_commands_that_make_train_proposes():
    makefile = (ROOT / "Makefile").read_text()
    (steps,) = re.findall(r"^define NEXT_STEPS$(.*?)^endef$", makefile, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^  horovodrun (.* python .*?)(?: +#.*)?$", steps, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        options = parse_args(command.split())
        assert (ROOT / options.command[-1]).is_file()
    for page in re.findall(r"\S+\.md", steps):
        assert (ROOT / page).is_file()


def test_the_examples_bring_the_dashboard():
    project = (ROOT / "pyproject.toml").read_text()
    (first,) = re.findall(r'^examples = \["(.*?)"', project, re.MULTILINE)
    assert "dashboard" in Requirement(first).extras
    (first,) = re.findall(r'^dashboard = \["(.*?)"', project, re.MULTILINE)
    assert Requirement(first).name == "aiohttp"
