"""What people and files learn of an elastic job while it runs.

The driver reports every event here. Lines about membership go to the console, with the reason;
with --status-file every event is also appended to that file, one JSON object a line with the time
in seconds since the epoch, the name of the event and its details.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.runner.output.colours import Colour
from horovod.runner.output.console import Console
from horovod.runner.output.report import LaunchError
from horovod.runner.output.watcher import JobWatcher

_COLOURS = {
    "host failed": Colour.FAILURE,
    "blacklisted": Colour.ATTENTION,
    "waiting": Colour.ATTENTION,
    "formed": Colour.GOOD,
}


class Status:
    """The console and, where asked for, the file; with ``every`` all events are for the console."""

    def __init__(
        self,
        console: Console,
        path: str | None = None,
        watcher: JobWatcher | None = None,
        *,
        every: bool = False,
    ) -> None:
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
        """For the file, and for who watches the job."""
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

    def tell(self, text: str, event: str, **details: Any) -> None:
        """For people as well."""
        loss = Colour.ATTENTION if details.get("lost") else Colour.PLAIN
        self._console.say(text, _COLOURS.get(event, loss))
        self._record(event, {"message": text, **details})

    def of_the_job(self) -> str | None:
        """The line of --progress, see `JobWatcher.status`."""
        return self._watcher.status() if self._watcher is not None else None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def count(number: int, thing: str) -> str:
    """``3 workers``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def listing(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
