"""``--completion``: what bash and fish offer for the beginning of a command line."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from horovod.runner.options.completion import SHELLS, completion_script
from horovod.runner.options.parser import make_parser


@pytest.fixture(scope="module", params=SHELLS)
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script of one shell, in a file that has the shell's name."""
    path = tmp_path_factory.mktemp("completion") / request.param
    path.write_text(completion_script(make_parser(), request.param) + "\n")
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return path


def _offers(script: Path, words: list[str], cwd: Path) -> list[str]:
    """What the shell offers for the last of these words."""
    if script.name == "fish":
        program = f"source {script}; complete -C '{' '.join(words)}' | string split -f1 \\t"
    else:
        program = (
            f"source {script}; COMP_WORDS=({' '.join(map(repr, words))}); "
            f"COMP_CWORD={len(words) - 1}; _horovodrun; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        )
    done = subprocess.run(
        [script.name, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_understands_the_script(script: Path):
    done = subprocess.run([script.name, "-n", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_option_is_there():
    flags = [
        flag
        for action in make_parser()._actions
        for flag in action.option_strings
        if flag.startswith("--") and action.help != "==SUPPRESS=="
    ]
    for shell in SHELLS:
        text = completion_script(make_parser(), shell)
        written = text.replace(" -l ", " --") if shell == "fish" else text
        assert [flag for flag in flags if flag not in written] == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["horovodrun", "--scaling-o"], ["--scaling-output"]),
        (["horovodrun", "-np", "2", "--dry"], ["--dry-run"]),
        (["horovodrun", "--cpu-bind", "nu"], ["numa"]),
        (["horovodrun", "--hostfile", "hos"], ["hosts.txt"]),
        (["horovodrun", "-np", "2", "cat", "hos"], ["hosts.txt"]),
    ],
)
def test_what_is_offered(script: Path, tmp_path: Path, words: list[str], offered: list[str]):
    if script.name == "zsh":
        pytest.skip("zsh completes only where somebody types")
    (tmp_path / "hosts.txt").touch()
    assert _offers(script, words, tmp_path) == offered


def test_a_command_is_offered_where_it_belongs(script: Path, tmp_path: Path):
    if script.name == "zsh":
        pytest.skip("zsh completes only where somebody types")
    assert "mkdir" in _offers(script, ["horovodrun", "-np", "2", "mkdi"], tmp_path)
