"""The interface through which other parts, such as the dashboard, follow a job.

`run_job`, `elastic.job` and the launchers for Spark and Ray call a `JobWatcher`. Its events are
those of --status-file (see docs/elastic.md). A fixed job has the same ones, with one decision,
number 0, whose workers have the names of their ranks. One more event, "stack", answers a watcher's
`StackRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from horovod.runner.output.lines import Line
from horovod.runner.output.report import Outcome


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
