"""Report the events of an elastic job to people, to a file and to the job's watcher.

The driver reports every event here. Lines about membership go to the console, with the reason. With
--status-file every event is also appended to that file: one JSON object per line, with the time in
seconds since the epoch, the name of the event and its details.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.runner.output.console import Colour, Console
from horovod.runner.output.report import LaunchError
from horovod.runner.output.watcher import JobWatcher

_COLOURS = {
    "host failed": Colour.FAILURE,
    "blacklisted": Colour.ATTENTION,
    "waiting": Colour.ATTENTION,
    "formed": Colour.GOOD,
}


class Status:
    """Writes events to the console and, if the user asks for it, to a file."""

    def __init__(
        self,
        console: Console,
        path: str | None = None,
        watcher: JobWatcher | None = None,
        *,
        every: bool = False,
    ) -> None:
        """Open the file.

        Args:
            console: Where lines for people go.
            path: The status file, if there is one.
            watcher: What else gets the events.
            every: Whether all events are shown on the console.

        Raises:
            LaunchError: If the file cannot be written.
        """
        self._console = console
        self._watcher = watcher
        self._every = every
        self._file = None
        if path is not None:
            try:
                self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise LaunchError(
                    f"argument --status-file: cannot write {path!r}: {error.strerror}", status=2
                ) from None

    def note(self, event: str, **details: Any) -> None:
        """Write an event to the file, and pass it on to the watcher."""
        if self._every:
            facts = ", ".join(f"{name} {value}" for name, value in details.items())
            self._console.say(f"event: {event}{': ' if facts else ''}{facts}", Colour.FAINT)
        self._record(event, details)

    def _record(self, event: str, details: Mapping[str, Any]) -> None:
        if self._watcher is not None:
            self._watcher.note(event, **details)
        if self._file is not None:
            entry = {"time": time.time(), "event": event, **details}
            try:
                self._file.write(json.dumps(entry) + "\n")
            except OSError as error:  # a full disk must not end a training
                self._console.say(f"the status file is not written any more: {error.strerror}")
                self._file = None

    def announce(self, text: str, event: str, **details: Any) -> None:
        """Show a line to people, and write the event that it is about."""
        loss = Colour.ATTENTION if details.get("lost") else Colour.PLAIN
        self._console.say(text, _COLOURS.get(event, loss))
        self._record(event, {"message": text, **details})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def count_of(number: int, thing: str) -> str:
    """Return a number and a noun, such as ``3 workers``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def join_words(words: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
