"""What the arguments of options may be: text in, value out, or the reason why not.

`arguments` hands these functions to argparse, which puts the option's name before the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from argparse import ArgumentTypeError
from collections.abc import Callable

from horovod.runner.options.discovery_command import split_command
from horovod.runner.slots.hosts import Host, parse_hosts

_MAX_RANK = 1_000_000


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number in these bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise ArgumentTypeError(f"must be {least} or more, not {value}")
        if most is not None and value > most:
            raise ArgumentTypeError(f"must be {most} or less, not {value}")
        return value

    return parse


def hosts(text: str) -> list[Host]:
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def names(text: str) -> list[str]:
    """``eth0,eth1`` as a list."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise ArgumentTypeError(f"{text!r} is not a list of names such as eth0,eth1")
    return found


def ranks(text: str) -> list[int]:
    """``0,2-3`` as 0, 2 and 3."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", part.strip())
        if match is None:
            raise ArgumentTypeError(f"{part!r} is not a rank or a range of ranks such as 2-3")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise ArgumentTypeError(f"the range {part!r} runs backwards")
        if high > _MAX_RANK:
            raise ArgumentTypeError(f"there is no rank {high}")
        found.update(range(low, high + 1))
    return sorted(found)


def sizes(text: str) -> list[int]:
    """``1,2,4`` as numbers of processes, the smallest first."""
    found: list[int] = []
    for part in text.split(","):
        if re.fullmatch(r"[0-9]{1,7}", part.strip()) is None:
            raise ArgumentTypeError(f"{part!r} is not a number of processes; write 1,2,4,8")
        size = int(part)
        if size == 0:
            raise ArgumentTypeError("a job has at least 1 process, not 0")
        if size in found:
            raise ArgumentTypeError(f"{size} is there twice; --repeat runs every size again")
        found.append(size)
    return sorted(found)


def rank(text: str) -> int:
    """A single rank."""
    if re.fullmatch(r"[0-9]{1,7}", text) is None or int(text) > _MAX_RANK:
        raise ArgumentTypeError(f"{text!r} is not a rank")
    return int(text)


def text(value: str) -> str:
    """Anything but nothing."""
    if not value:
        raise ArgumentTypeError("must not be empty")
    return value


def readable_file(path: str) -> str:
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise ArgumentTypeError(f"there is no file {path!r}")
    if not os.access(path, os.R_OK):
        raise ArgumentTypeError(f"{path!r} is not readable")
    return path


def new_file(path: str) -> str:
    """A file that can be made: its directory exists."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not path:
        raise ArgumentTypeError(f"{path!r} is not the name of a file")
    if not os.path.isdir(folder):
        raise ArgumentTypeError(f"there is no directory {folder!r}")
    return path


def command_line(text: str) -> str:
    """A program with arguments, if any, and its absolute path in place of its name."""
    try:
        name, *arguments = split_command(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return shlex.join([program(name), *arguments])


def program(path: str) -> str:
    """The absolute path of an executable, found as a shell would or in this directory."""
    here = os.path.abspath(os.path.expanduser(path))
    if os.path.isfile(here):
        if not os.access(here, os.X_OK):
            raise ArgumentTypeError(f"{path!r} is not executable; try: chmod +x {path}")
        return here
    found = shutil.which(path)
    if found is None:
        raise ArgumentTypeError(f"there is no program {path!r}")
    return os.path.abspath(found)
