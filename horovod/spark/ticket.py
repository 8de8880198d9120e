"""The record of what a Spark task needs to know of its job. It travels in the task's closure.

Spark sends closures over its own authenticated connections, and keeps them out of event logs and
its web pages. The job's key is nowhere else: not in a command line, not in Spark's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ticket:
    """The facts about a job; `job_setup` makes the record, `task.relay` uses it."""

    address: str  # where the driver listens for tasks
    port: int
    key: bytes = field(repr=False)
    env: Mapping[str, str] = field(repr=False)  # the workers' variables, besides the executor's
    search_path: Sequence[str]  # where the driver finds modules
    executable: str | None  # the workers' Python; None: the executor's
    version: str  # the driver's version of Horovod
    start_timeout: float
    max_failures: int  # attempts after which Spark gives a task up, and the job with it
