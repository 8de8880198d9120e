"""Colour for the launcher's own messages: when it is wanted, and how text gets it.

`console` asks `wanted` once for each of its streams. What workers write is never coloured. The
meaning of a message never rests on its colour alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum


class Colour(str, Enum):
    """What a message is, by the escape sequence that shows it."""

    PLAIN = ""
    SPEAKER = "\x1b[36m"  # cyan: who speaks
    FAINT = "\x1b[2m"
    GOOD = "\x1b[32m"
    ATTENTION = "\x1b[33m"  # something is waited for, or was ignored
    FAILURE = "\x1b[31m"
    FAILURE_TITLE = "\x1b[1;31m"


_END = "\x1b[0m"


def wanted(fd: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether text that goes to this descriptor is coloured.

    On a terminal, unless it is a dumb one. NO_COLOR, set to anything but nothing, forbids it.
    FORCE_COLOR asks for it elsewhere too, for logs that are shown with colours; "0" means nothing.
    """
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return environ.get("TERM") != "dumb" and os.isatty(fd)


def paint(text: str, colour: Colour) -> str:
    """The text in that colour, which ends with every line."""
    if colour is Colour.PLAIN:
        return text
    return "\n".join(
        f"{colour.value}{line}{_END}" if line.strip() else line for line in text.split("\n")
    )
