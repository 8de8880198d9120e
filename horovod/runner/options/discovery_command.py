"""What ``--host-discovery-script`` names: a program, or a command line with arguments.

`options.values` checks it and `discovery` runs it. It is taken apart by the shell's rules of
quoting, but no shell runs it, as with every other command of the launcher: nothing is expanded.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
from typing import Any

_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.""", re.DOTALL)


def split_command(text: str) -> list[str]:
    """The program and its arguments; `ValueError` where only a shell could run it."""
    if os.path.isfile(os.path.expanduser(text)):
        return [text]  # whatever its name looks like
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a command line: {error}") from None
    if not words:
        raise ValueError("it is empty")
    operator = re.search("[();<>|&]", _QUOTED.sub("", text))
    if operator is not None:
        raise ValueError(
            f"{text!r} has {operator[0]!r}, for which it would need a shell: put it into a "
            f"script, or write sh -c '...'"
        )
    return words


def start(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
    """Start it; a script that does not say what runs it is run by sh, as a shell would do it."""
    try:
        return subprocess.Popen(command, **how)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        path = shutil.which(command[0]) or command[0]
        return subprocess.Popen(["/bin/sh", path, *command[1:]], **how)
