"""What a machine lacks is one line at the end of a test run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_without_sshd_there_is_one_line_with_what_to_install():
    tests = ["tests/multihost/test_ssh.py", "tests/multihost/test_elastic.py"]
    options = ["-p", "no:cacheprovider", "-p", "tests.without_sshd"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    (line,) = [line for line in lines if "sshd" in line]
    assert line.endswith(
        "tests of several hosts did not run, for want of sshd: "
        "apt-get install openssh-server openssh-client"
    )
    assert int(line.split()[0]) > 10
    assert not any("SKIPPED" in line for line in lines)
    assert f"{line.split()[0]} not possible here" in lines[-1]
