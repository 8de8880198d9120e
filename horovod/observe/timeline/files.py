"""Read the file of one rank, even of a rank that was killed or of an earlier version.

The names in such a file that `recorder` and the readers share are here, too. `recording` interprets
the events.
"""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]

START_TIME = "start_time_since_epoch_in_micros"
NEGOTIATE = "NEGOTIATE_"  # begins the name of the event before a collective

# Spans that upstream does not have.
WAIT = "WAIT"  # a thread of the program waits for results
STEP = "STEP"  # from the end of one exchange of gradients to the end of the next
BACKWARD = "BACKWARD"  # from the first gradient of a step until they are waited for

VERSION = 2  # version 1 has no spans, no clock and no numbers; upstream's files have no version

_BETWEEN_EVENTS = tuple(" \t\r\n,\0")


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
    decoder = json.JSONDecoder()
    events: list[Event] = []
    position = 1
    while text.startswith("["):
        while text[position : position + 1] in _BETWEEN_EVENTS:
            position += 1
        try:
            event, position = decoder.raw_decode(text, position)
        except ValueError:  # the end of the array, or of the file
            break
        if not isinstance(event, dict):
            return None
        events.append(event)
    return events or None
