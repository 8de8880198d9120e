"""Read the file of one rank, even of a rank that was killed or of an earlier version.

`recording` uses this, and interprets the events.
"""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]


def load(path: str) -> list[Event]:
    """Return the complete events of one file.

    A kill, a full disk or a copy made while the job runs may have cut the file anywhere.

    Raises:
        ValueError: The file is empty, or is not a timeline.
        OSError: The file cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read().strip("\0 \t\r\n")
    if not text:
        raise ValueError(f"{path} is empty: did the rank end before it started to record?")
    events = _parse_whole(text)
    if events is None:
        events = _parse_events(text)
    if events is None:
        raise ValueError(f"{path} is not a timeline: it is not a JSON array of events")
    return events


def _parse_whole(text: str) -> list[Event] | None:
    """Return the events of an intact file, which another program may have formatted its own way."""
    if not text.endswith(("]", "}")):
        return None
    try:
        content = json.loads(text)
    except ValueError:
        return None
    if isinstance(content, dict):
        content = content.get("traceEvents")
    if not isinstance(content, list) or not all(isinstance(event, dict) for event in content):
        return None
    return content


def _parse_events(text: str) -> list[Event] | None:
    """Return one event after the other, up to the one in which the file was cut."""
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


_LONGEST_EVENT = 1 << 20  # characters: a longer text is not an event that was cut
