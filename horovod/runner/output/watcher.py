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

    wants_stacks = False
    """Whether `wanted_stacks` ever has something, so that it is worth asking."""

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

    def __enter__(self) -> JobWatcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)
