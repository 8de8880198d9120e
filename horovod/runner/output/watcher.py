"""The events of a job, and the interface through which the dashboard and others follow it.

`run_job` and the launchers for Spark and Ray call a `JobWatcher`. Its events are those of
--status-file (see docs/elastic.md). A fixed job has the same ones, with one decision, number 0,
whose workers have the names of their ranks. One more event, "stack", answers a watcher's
`StackRequest`.

The driver of an elastic job reports every event to a `Status`. Lines about membership go to the
console, with the reason. With --status-file every event is also appended to that file: one JSON
object per line, with the time in seconds since the epoch, the name of the event and its details.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from horovod.runner.output.console import Colour, Console
from horovod.runner.output.lines import Line
from horovod.runner.output.report import LaunchError, Outcome


class StackRequest(NamedTuple):
    """A watcher's request for the Python stack of a worker."""

    worker: int
    pid: int  # as the worker itself reported it; its agent checks that


class JobWatcher:
    """Base class for watchers; this one ignores everything. The launcher's thread calls it."""

    @property
    def wants_stacks(self) -> bool:
        """Whether `wanted_stacks` may ever return something."""
        return False

    def note(self, event: str, **details: Any) -> None:
        """Take notice of an event of the status file, with its details."""

    def output(self, worker: int, rank: int, stream: str, lines: Sequence[Line]) -> None:
        """Take lines that a worker, which has this rank now, wrote to a stream."""

    def wanted_stacks(self) -> Sequence[StackRequest]:
        """Return new requests for stacks; the answers come with `note("stack", ...)`."""
        return ()

    def ended(self, outcome: Outcome) -> None:
        """Take notice of the end of the job, after its account is written."""

    def close(self, error: BaseException | None = None) -> None:
        """Stop watching; ``error`` is the exception with which the launcher ends, if any."""

    def variables(self) -> dict[str, str]:
        """Return the variables that workers need in their environment."""
        return {}

    def status(self) -> str | None:
        """Return one line on how the job goes, empty before its first step.

        Returns:
            None if this watcher makes no such line.
        """
        return None

    def __enter__(self) -> JobWatcher:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)


class Watchers(JobWatcher):
    """Several watchers as one. The first of them that has a status provides it."""

    def __init__(self, *watchers: JobWatcher) -> None:
        self._watchers = watchers

    def note(self, event: str, **details: Any) -> None:
        for each in self._watchers:
            each.note(event, **details)

    def output(self, worker: int, rank: int, stream: str, lines: Sequence[Line]) -> None:
        for each in self._watchers:
            each.output(worker, rank, stream, lines)

    @property
    def wants_stacks(self) -> bool:
        return any(each.wants_stacks for each in self._watchers)

    def wanted_stacks(self) -> Sequence[StackRequest]:
        return [wanted for each in self._watchers for wanted in each.wanted_stacks()]

    def ended(self, outcome: Outcome) -> None:
        for each in self._watchers:
            each.ended(outcome)

    def close(self, error: BaseException | None = None) -> None:
        for each in self._watchers:
            each.close(error)

    def variables(self) -> dict[str, str]:
        return {name: text for each in self._watchers for name, text in each.variables().items()}

    def status(self) -> str | None:
        lines = (each.status() for each in self._watchers)
        return next((line for line in lines if line is not None), None)


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
