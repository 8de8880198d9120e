"""What a launcher tells to whoever watches its job.

`run_job`, `elastic.job` and the launchers for Spark and Ray hold a `JobWatcher`; the dashboard is
one. Events are those of --status-file (see docs/elastic.md): a fixed job has the same ones, with
one decision, number 0, whose workers have the names of their ranks. One more event, "stack",
answers what a watcher has asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from horovod.runner.output.lines import Line
from horovod.runner.output.report import Outcome


class StackRequest(NamedTuple):
    """A watcher would like to know where a worker is in its code."""

    worker: int
    pid: int  # as the worker itself says; its agent checks that


class JobWatcher:
    """Hears what happens in a job; this one takes no notice. Called by the launcher's thread."""

    @property
    def wants_stacks(self) -> bool:
        """Whether `wanted_stacks` ever has something, so that it is worth asking."""
        return False

    def note(self, event: str, **details: Any) -> None:
        """Something happened."""

    def output(self, worker: int, rank: int, stream: str, lines: Sequence[Line]) -> None:
        """A worker, which is that rank now, wrote these lines."""

    def wanted_stacks(self) -> Sequence[StackRequest]:
        """Workers whose stack is wanted since the last call; it comes with `note("stack", ...)`."""
        return ()

    def ended(self, outcome: Outcome) -> None:
        """The job is over, and its account is written."""

    def close(self, error: BaseException | None = None) -> None:
        """Nothing more comes. ``error`` is what the launcher itself ends with, if anything."""

    def variables(self) -> dict[str, str]:
        """What workers need in their environment."""
        return {}

    def status(self) -> str | None:
        """One line on how the job goes, empty before its first step; None if nobody wants one."""
        return None

    def __enter__(self) -> JobWatcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)


class Watchers(JobWatcher):
    """Several of them; the first one that has a status says it."""

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
        found = (each.status() for each in self._watchers)
        return next((line for line in found if line is not None), None)
