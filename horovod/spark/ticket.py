"""What a Spark task needs to know of its job. It travels inside the task's closure.

Spark sends closures over its own authenticated connections, and keeps them out of event logs and
its web pages. The job's key is nowhere else: not in a command line, not in Spark's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ticket:
    """Made by `horovod.spark.runner`, used by `horovod.spark.task.relay`."""

    address: str  # where the driver listens for tasks
    port: int
    key: bytes = field(repr=False)
    env: Mapping[str, str] = field(repr=False)  # for the workers, beyond the executor's own
    search_path: Sequence[str]  # where the driver finds modules
    executable: str | None  # the workers' Python; None: the executor's
    version: str  # of the driver's Horovod
    start_timeout: float
    max_failures: int  # attempts after which Spark gives a task up, and the job with it
