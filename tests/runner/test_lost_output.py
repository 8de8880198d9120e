"""Output that goes nowhere: a full disk, a closed descriptor. Words for people, no traceback."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from tests.runner.horovodrun import HANG, command, environment

JOB = ("-np", "2", "echo", "hello")


def in_shell(arguments: tuple[str, ...], redirection: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f"{shlex.join(command(*arguments))} {redirection}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


@pytest.mark.parametrize("arguments", [JOB, ("--version",), ("--dry-run", *JOB)])
def test_a_full_disk_is_told_and_fails(arguments: tuple[str, ...]):
    done = in_shell(arguments, "> /dev/full")
    assert done.returncode == 1
    assert done.stderr == "horovodrun: cannot write to stdout: No space left on device\n"


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "<&-", "2>/dev/full"])
def test_a_closed_descriptor_is_nobody_who_listens(redirection: str):
    done = in_shell(JOB, redirection)
    assert (done.returncode, done.stderr) == (0, "")
    shown = sorted(done.stdout.splitlines())
    assert shown == ([] if ">&-" in redirection else ["[0]<stdout>:hello", "[1]<stdout>:hello"])
