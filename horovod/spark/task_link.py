"""What the driver and its Spark tasks know of each other: the ticket, and the links to tasks.

A task gets its `Ticket` with its closure, connects to the `TaskServer`, which `job_setup` opens
before it starts the Spark job, and describes itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from typing import Any

from horovod.runner.api import ChannelLink, LinkChannel, LinkServer


@dataclass(frozen=True)
class Ticket:
    """What a task needs to know of its job.

    Spark sends closures over its own authenticated connections, and keeps them out of event logs
    and its web pages. The job's key is nowhere else: not in a command line, not in Spark's
    configuration.
    """

    address: str  # where the driver listens for tasks
    port: int
    key: bytes = field(repr=False)
    env: Mapping[str, str] = field(repr=False)  # the workers' variables, besides the executor's
    search_path: Sequence[str]  # where the driver finds modules
    executable: str | None  # the workers' Python; None: the executor's
    version: str  # the driver's version of Horovod
    start_timeout: float
    max_failures: int  # attempts after which Spark gives a task up, and the job with it


@dataclass(frozen=True)
class TaskInfo:
    """Facts about a task, from the task itself."""

    partition: int
    attempt: tuple[int, int]  # Spark's id, unique in the application, and our number within it
    host: str  # equal for tasks that share a host
    hostname: str
    python: str
    versions: Mapping[str, str | None]


class TaskLink(ChannelLink):
    """The driver's end of the connection to a task."""

    connection_ended = "its Spark task or its executor ended"
    agent = "the agent in its Spark task"

    def __init__(self, channel: LinkChannel, info: TaskInfo) -> None:
        super().__init__(channel)
        self.info = info

    @property
    def name(self) -> str:
        """The name of the task's agent in messages."""
        return f"{self.info.hostname} (Spark task {self.info.partition})"

    @property
    def elastic_host(self) -> str:
        """The name of the host that this attempt of the task is in an elastic job."""
        info = self.info
        return f"{info.host}-{info.partition}-{info.attempt[0]}.{info.attempt[1]}"


class TaskServer(LinkServer[TaskLink]):
    """The server to which the tasks of a job connect."""

    owner = "horovod.spark"

    def make_link(self, channel: LinkChannel, hello: Mapping[str, Any]) -> TaskLink:
        facts = {each.name: hello[each.name] for each in fields(TaskInfo)}
        facts["attempt"] = tuple(facts["attempt"])
        return TaskLink(channel, TaskInfo(**facts))

    def newest(self) -> dict[int, TaskLink]:
        """Return the link to the newest living attempt of each partition."""
        found: dict[int, TaskLink] = {}
        for link in self.living():
            older = found.get(link.info.partition)
            if older is None or older.info.attempt < link.info.attempt:
                found[link.info.partition] = link
        return found

    def partitions(self) -> set[int]:
        """Return the partitions whose tasks are running."""
        return {link.info.partition for link in self.links() if link.holds_host}


def installed_torch() -> str | None:
    """Return the version of torch that this Python has, without importing it; None without it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
