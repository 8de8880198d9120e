"""docker/Dockerfile: what it copies and installs exists, and its command trains.

There is no Docker where the tests run, so no image is built.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
from pathlib import Path

from horovod.runner.options.arguments import parse_args

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker" / "Dockerfile"
PROJECT = (ROOT / "pyproject.toml").read_text()


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    words = [line.partition(" ") for line in joined.split("\n") if line]
    return [(word, rest) for word, _, rest in words]


def of(word: str) -> list[str]:
    return [rest for found, rest in instructions() if found == word]


def test_only_known_instructions():
    assert {word for word, _ in instructions()} == {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "CMD"}


def test_what_is_copied_exists_and_is_sent_to_the_builder():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    sent = [pattern[1:] for pattern in ignored if pattern.startswith("!")]
    for copied in of("COPY"):
        *sources, _ = shlex.split(copied)
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), source


def test_the_package_can_be_built_from_what_is_copied():
    copied = {source for line in of("COPY") for source in shlex.split(line)[:-1]}
    (readme,) = re.findall(r'^readme = "(.*)"$', PROJECT, re.MULTILINE)
    (licence,) = re.findall(r'^license-files = \["(.*)"\]$', PROJECT, re.MULTILINE)
    wheel = PROJECT.partition("[tool.hatch.build.targets.wheel]")[2]
    (package,) = re.findall(r'^packages = \["(.*)"\]$', wheel.partition("\n[")[0], re.MULTILINE)
    (version,) = re.findall(r'^path = "(\w+)/.*"$', PROJECT, re.MULTILINE)
    assert {"pyproject.toml", readme, licence, package, version} <= copied


def test_what_is_installed_exists():
    (found,) = re.findall(r"^python:3\.(\d+)-slim$", of("FROM")[0])
    (least,) = re.findall(r'^requires-python = ">=3\.(\d+)"$', PROJECT, re.MULTILINE)
    assert int(found) >= int(least)
    (install,) = (run for run in of("RUN") if "'.[" in run)
    words = shlex.split(install)
    assert words[:2] == ["pip", "install"]
    assert (ROOT / words[words.index("-c") + 1]).is_file()
    (extra,) = re.findall(r"^\.\[(\w+)\]$", words[-1])
    extras = PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert re.search(rf"^{extra} = \[", extras, re.MULTILINE)


def test_shell_commands_are_understood_by_a_shell():
    for run in of("RUN"):
        subprocess.run(["sh", "-n", "-c", run], check=True)


def test_its_command_is_understood():
    """The script is trained by tests/examples; here it is asked for its options."""
    assert of("WORKDIR")[-1] == "/opt/horovod/examples"
    program, *arguments = json.loads(of("CMD")[0])
    assert program == "horovodrun"
    options = parse_args(arguments)
    assert options.num_proc == 2
    python, script, *given = options.command
    assert python == "python"
    source = (ROOT / "examples" / script).read_text()
    assert all(f'"{word}"' in source for word in given if word.startswith("--"))
