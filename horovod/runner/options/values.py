"""Turn the arguments of options into values, or raise a `ValueError` with the reason.

`options.parser` hands these functions to `syntax.Parser`, which puts the option's name before the
reason. `split_command` and `start_program` are for ``--host-discovery-script``, which
`elastic.discovery` runs.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from horovod.runner.agents.starters import HOST

_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.""", re.DOTALL)


def split_command(text: str) -> list[str]:
    """Split a command into its program and arguments.

    The shell's rules of quoting apply, but no shell runs the command and nothing is expanded, as
    with every other command of the launcher.

    Raises:
        ValueError: If only a shell could run it.
    """
    if os.path.isfile(os.path.expanduser(text)):
        return [text]  # even if its name has spaces or other special characters
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


def start_program(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
    """Start a command; like a shell, let sh run a script that has no ``#!`` line."""
    try:
        return subprocess.Popen(command, **how)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        path = shutil.which(command[0]) or command[0]
        return subprocess.Popen(["/bin/sh", path, *command[1:]], **how)


_MAX_RANK = 1_000_000


def whole_number(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a function that reads a whole number in these bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if value < minimum:
            raise ValueError(f"must be {minimum} or more, not {value}")
        if maximum is not None and value > maximum:
            raise ValueError(f"must be {maximum} or less, not {value}")
        return value

    return parse


def names(text: str) -> list[str]:
    """Read a list of names such as ``eth0,eth1``."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise ValueError(f"{text!r} is not a list of names such as eth0,eth1")
    return found


def ranks(text: str) -> list[int]:
    """Read a list of ranks: ``0,2-3`` stands for 0, 2 and 3."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not a rank or a range of ranks such as 2-3")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise ValueError(f"the range {part!r} runs backwards")
        if high > _MAX_RANK:
            raise ValueError(f"there is no rank {high}")
        found.update(range(low, high + 1))
    return sorted(found)


def sizes(text: str) -> list[int]:
    """Read numbers of processes such as ``1,2,4``, and sort them."""
    found: list[int] = []
    for part in text.split(","):
        if re.fullmatch(r"[0-9]{1,7}", part.strip()) is None:
            raise ValueError(f"{part!r} is not a number of processes; write 1,2,4,8")
        size = int(part)
        if size == 0:
            raise ValueError("a job has at least 1 process, not 0")
        if size in found:
            raise ValueError(f"{size} is there twice; --repeat runs every size again")
        found.append(size)
    return sorted(found)


def rank(text: str) -> int:
    """Read a single rank."""
    if re.fullmatch(r"[0-9]{1,7}", text) is None or int(text) > _MAX_RANK:
        raise ValueError(f"{text!r} is not a rank")
    return int(text)


def text(value: str) -> str:
    """Accept any text that is not empty."""
    if not value:
        raise ValueError("must not be empty")
    return value


def readable_file(path: str) -> str:
    """Accept a file that can be read."""
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path!r}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{path!r} is not readable")
    return path


def new_file(path: str) -> str:
    """Accept the name of a file whose directory exists."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not path:
        raise ValueError(f"{path!r} is not the name of a file")
    if not os.path.isdir(folder):
        raise ValueError(f"there is no directory {folder!r}")
    return path


def endpoint(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, ``[IPV6]:PORT``, or ``PORT`` alone, which stands for all addresses."""
    match = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):)?([0-9]{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, such as node1:29400")
    return (match[1] or "0.0.0.0").strip("[]"), int(match[2])


def start_command(text: str) -> str:
    """Accept a command that contains ``{host}`` and whose program exists."""
    if HOST not in text:
        raise ValueError(
            f"{HOST} must stand in it for the host's name: 'kubectl exec -i {HOST} --'"
        )
    return command_line(text)


def command_line(text: str) -> str:
    """Read a program and its arguments, and replace the program by its absolute path."""
    name, *arguments = split_command(text)
    return shlex.join([program(name), *arguments])


def program(path: str) -> str:
    """Return the absolute path of a program, which is on PATH or in this directory."""
    here = os.path.abspath(os.path.expanduser(path))
    if os.path.isfile(here):
        if not os.access(here, os.X_OK):
            raise ValueError(f"{path!r} is not executable; try: chmod +x {path}")
        return here
    found = shutil.which(path)
    if found is None:
        raise ValueError(f"there is no program {path!r}")
    return os.path.abspath(found)


_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"


def parameters(text: str) -> float:
    """Read a number of parameters such as ``124M``."""
    match = re.fullmatch(rf"{_NUMBER}([KMB]?)", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a number of parameters such as 350K, 124M or 7B")
    return float(match[1]) * _COUNTS[match[2].upper()]


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    match = re.fullmatch(rf"{_NUMBER}s?", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a number of seconds such as 0.3")
    return float(match[1])


def link(text: str) -> tuple[float, float]:
    """Read a link such as ``1Gbit/20ms``: seconds one way, and bytes per second."""
    match = re.fullmatch(rf"{_NUMBER}([kmg]bit)(?:/s)?(?:/{_NUMBER}(us|ms|s))?", text.lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a link such as 10Gbit, 1Gbit/20ms or 100Mbit/50ms")
    latency = float(match[3]) * _TIMES[match[4]] if match[3] else 0.0
    return latency, float(match[1]) * _RATES[match[2]] / 8
