"""Represent Spark tasks in the driver: where each runs, and the connection to its agent.

The tasks of a job connect to a `TaskServer`, which `runner` opens before it starts the Spark job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovod.runner.api import ChannelLink, LinkChannel, LinkServer


@dataclass(frozen=True)
class TaskInfo:
    """Facts about a task, from the task itself."""

    partition: int
    attempt: tuple[int, int]  # Spark's id, unique in the application, and our number within it
    host: str  # equal for tasks that share a host
    hostname: str
    python: str
    versions: Mapping[str, str | None]

    @classmethod
    def from_message(cls, fields: Mapping[str, Any]) -> TaskInfo:
        return cls(
            partition=int(fields["partition"]),
            attempt=(int(fields["attempt"][0]), int(fields["attempt"][1])),
            host=str(fields["host"]),
            hostname=str(fields["hostname"]),
            python=str(fields["python"]),
            versions=dict(fields["versions"]),
        )


class TaskLink(ChannelLink):
    """The driver's end of the connection to a task."""

    connection_ended = "its Spark task or its executor ended"
    agent = "the agent in its Spark task"

    def __init__(self, channel: LinkChannel, info: TaskInfo) -> None:
        super().__init__(channel)
        self.info = info


class TaskServer(LinkServer[TaskLink]):
    """The server to which the tasks of a job connect."""

    owner = "horovod.spark"

    def make_link(self, channel: LinkChannel, hello: Mapping[str, Any]) -> TaskLink:
        return TaskLink(channel, TaskInfo.from_message(hello))

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
