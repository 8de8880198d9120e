"""Reading the file of one rank: also of one that was killed, and of earlier versions.

Used by `recording`, which gives the events a meaning.
"""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]


def load(path: str) -> list[Event]:
    """The events of one file, as far as they are complete.

    A kill, a full disk or a copy made while the job runs may have cut the file anywhere.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read().strip("\0 \t\r\n")
    if not text:
        raise ValueError(f"{path} is empty: did the rank end before it started to record?")
    events = _whole(text)
    if events is None:
        events = _by_line(text)
    if events is None:
        raise ValueError(f"{path} is not a timeline: it is not a JSON array of events")
    return events


def _whole(text: str) -> list[Event] | None:
    """An intact file; what other programs have written may be spread over lines in other ways."""
    if not text.endswith(("]", "}")):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if isinstance(found, dict):
        found = found.get("traceEvents")
    if not isinstance(found, list) or not all(isinstance(event, dict) for event in found):
        return None
    return found


def _by_line(text: str) -> list[Event] | None:
    """One event after the other, up to the one in which the file was cut."""
    if not text.startswith("["):
        return None
    decoder = json.JSONDecoder()
    events: list[Event] = []
    position = 1
    while True:
        while position < len(text) and text[position] in " \t\r\n,\0":
            position += 1
        if position >= len(text) or text[position] == "]":
            break
        try:
            event, position = decoder.raw_decode(text, position)
        except ValueError:
            if len(text) - position > _LONGEST_EVENT and not events:
                return None
            break
        if not isinstance(event, dict):
            return None
        events.append(event)
    return events or None


_LONGEST_EVENT = 1 << 20  # characters: what is longer is no event that was cut
