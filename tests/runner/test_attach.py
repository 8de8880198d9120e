"""``horovodrun --attach``: one rank has the launcher's stdin, and what it writes comes as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.horovodrun import HANG, command, environment, run_python

DEBUGGED = """
import os
answer = 41
if os.environ["RANK"] == "1":
    breakpoint()
print(f"the answer is {answer}\\n", end="")  # as one piece
"""


def attached(rank: int, program: str, stdin: str | int, *options: str):
    given = {"stdin": stdin} if isinstance(stdin, int) else {"input": stdin}
    return subprocess.run(
        command("-np", "2", "--attach", str(rank), *options, sys.executable, "-c", program),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
        **given,
    )


def test_a_breakpoint_of_one_rank():
    done = attached(1, DEBUGGED, "p answer + 1\nanswer = 43\nc\n")
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 42\n" in done.stdout  # the prompt has no end of line, and is there
    assert "the answer is 43\n" in done.stdout
    assert "[0]<stdout>:the answer is 41\n" in done.stdout


def test_the_others_have_no_stdin_and_the_end_of_ours_is_the_end():
    program = """
import os, sys
print(f"read {os.environ['RANK']} {sys.stdin.read()!r}\\n", end="")  # as one piece
"""
    done = attached(0, program, "a\nb")
    assert done.returncode == 0, done.stderr
    assert "read 0 'a\\nb'\n" in done.stdout
    assert "[1]<stdout>:read 1 ''\n" in done.stdout


def test_much_input_from_a_file_to_a_slow_reader(tmp_path: Path):
    text = "0123456789abcde\n" * 40_000
    (tmp_path / "input").write_text(text)
    with open(tmp_path / "input") as file:
        done = attached(0, "import sys; print(len(sys.stdin.read()))", file.fileno())
    assert done.returncode == 0, done.stderr
    assert f"{len(text)}\n" in done.stdout


def test_without_it_a_breakpoint_gets_a_hint():
    done = run_python(2, DEBUGGED)
    assert done.returncode == 1
    assert "breakpoint() needs somebody to talk to: horovodrun --attach 1\n" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--attach", "2"], "argument --attach: there is no rank 2, 1 is last"),
        (["--attach", "x"], "argument --attach: 'x' is not a rank"),
        (["--attach", "0", "--min-np", "1"], "not possible in an elastic job"),
        (["--attach", "0", "--mpi"], "--stdin 0"),
    ],
)
def test_mistakes(options: list[str], words: str):
    done = run_python(2, "print(1)", options=options)
    assert done.returncode == 2
    assert words in done.stderr
