"""What the arguments of options may be: text in, value out, or a `ValueError` with the reason.

`options.parser` hands these functions to `syntax.Parser`, which puts the option's name before it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable

from horovod.runner.agents.starter import HOST
from horovod.runner.options.discovery_command import split_command

_MAX_RANK = 1_000_000


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number in these bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if value < least:
            raise ValueError(f"must be {least} or more, not {value}")
        if most is not None and value > most:
            raise ValueError(f"must be {most} or less, not {value}")
        return value

    return parse


def names(text: str) -> list[str]:
    """``eth0,eth1`` as a list."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise ValueError(f"{text!r} is not a list of names such as eth0,eth1")
    return found


def ranks(text: str) -> list[int]:
    """``0,2-3`` as 0, 2 and 3."""
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
    """``1,2,4`` as numbers of processes, the smallest first."""
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
    """A single rank."""
    if re.fullmatch(r"[0-9]{1,7}", text) is None or int(text) > _MAX_RANK:
        raise ValueError(f"{text!r} is not a rank")
    return int(text)


def text(value: str) -> str:
    """Anything but nothing."""
    if not value:
        raise ValueError("must not be empty")
    return value


def readable_file(path: str) -> str:
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path!r}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{path!r} is not readable")
    return path


def new_file(path: str) -> str:
    """A file that can be made: its directory exists."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not path:
        raise ValueError(f"{path!r} is not the name of a file")
    if not os.path.isdir(folder):
        raise ValueError(f"there is no directory {folder!r}")
    return path


def endpoint(text: str) -> tuple[str, int]:
    """``HOST:PORT``, ``[IPV6]:PORT`` or ``PORT`` alone, which stands for all addresses."""
    match = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):)?([0-9]{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, such as node1:29400")
    return (match[1] or "0.0.0.0").strip("[]"), int(match[2])


def start_command(text: str) -> str:
    """A command in which ``{host}`` stands for a host, and whose program is there."""
    if HOST not in text:
        raise ValueError(
            f"{HOST} must stand in it for the host's name: 'kubectl exec -i {HOST} --'"
        )
    return command_line(text)


def command_line(text: str) -> str:
    """A program with arguments, if any, and its absolute path in place of its name."""
    name, *arguments = split_command(text)
    return shlex.join([program(name), *arguments])


def program(path: str) -> str:
    """The absolute path of an executable, found as a shell would or in this directory."""
    here = os.path.abspath(os.path.expanduser(path))
    if os.path.isfile(here):
        if not os.access(here, os.X_OK):
            raise ValueError(f"{path!r} is not executable; try: chmod +x {path}")
        return here
    found = shutil.which(path)
    if found is None:
        raise ValueError(f"there is no program {path!r}")
    return os.path.abspath(found)
