"""docs/ssh.md: its commands are understood, and what it says about the environment is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from horovod.runner.slots.worker_env import HOST_VARIABLES, travelling_variables
from tests.runner import stub_ssh
from tests.runner.horovodrun import run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ssh.md").read_text()
COMMANDS = re.findall(r"^horovodrun (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_plan_what_the_page_says(command: str, tmp_path: Path):
    (tmp_path / "hosts.txt").write_text("node1 slots=4\nnode2 slots=4\n")
    env = stub_ssh.install(tmp_path)
    done = run("--dry-run", *shlex.split(command), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "node1 (through ssh): ranks 0-3" in done.stdout
    assert "node2 (through ssh): ranks 4-7" in done.stdout
    assert "python train.py\n" in done.stdout


def test_the_environment_is_as_told():
    (section,) = re.findall(r"## The environment of the workers\n(.*?)\n## ", PAGE, re.DOTALL)
    told, own = (
        section.partition("are those of the host")[0]
        .rsplit("Not passed on", 1)[1]
        .split("shell functions and the like.")
    )
    stays = {name.replace("*", "X") for name in re.findall(r"`([A-Z_*]+)`", told)}
    assert len(stays) > 5
    assert travelling_variables(dict.fromkeys(stays, "")) == {}
    assert set(re.findall(r"`([A-Z_]+)`", own)) == set(HOST_VARIABLES)
    passed = {"PATH": "", "PYTHONPATH": "", "LD_LIBRARY_PATH": "", "HOROVOD_CYCLE_TIME": "1"}
    assert travelling_variables(passed) == passed
