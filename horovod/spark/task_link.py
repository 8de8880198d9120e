"""One Spark task, seen from the driver: where it runs, and the line to its agent.

`task_server` makes a `TaskLink` when a task has connected; `horovod.runner.agents.host_agent`
speaks through it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.runner.agents.host_agent import HostAgent, agent_source
from horovod.spark.channel import DriverChannel

_CHUNK = 1 << 18
_KEPT_ERRORS = 8000


@dataclass(frozen=True)
class TaskInfo:
    """What a task said about itself."""

    partition: int
    attempt: tuple[int, int]  # Spark's, unlike any other of the application, and ours within it
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


class TaskLink:
    """The driver's end of the line; see `horovod.runner.agents.agent_link.AgentLink`."""

    remote = True
    keeps: Sequence[str] | None = None
    pid = 0  # on another machine

    def __init__(self, channel: DriverChannel, info: TaskInfo) -> None:
        self.info = info
        self.restarts: Callable[[], bool] = lambda: False
        """Whether Spark should start the task again when its agent is released."""
        self._channel = channel
        self._input_fd = os.dup(channel.socket.fileno())  # a selector takes a number only once
        self._ends = _ends(channel)
        self._errors = b""
        self._code: int | None = None
        self._closed = False
        self._over = False

    def start_agent(self, name: str) -> HostAgent:
        """The agent in this task, with that name."""
        self._channel.send({"agent": len(agent_source(0))})
        return HostAgent(name, link=self)

    # -- for HostAgent ---------------------------------------------------------------------

    @property
    def input_fd(self) -> int:
        return self._input_fd

    @property
    def output_fd(self) -> int:
        return self._channel.socket.fileno()

    @property
    def errors_fd(self) -> int | None:
        return None

    @property
    def unsent(self) -> bool:
        return self._channel.unsent > 0

    @property
    def ends(self) -> tuple[str, str]:
        return self._ends

    def write(self, data: memoryview) -> int:
        if self._over:
            raise BrokenPipeError("the task has ended")
        self.flush()
        piece = bytes(data[:_CHUNK])
        self._channel.send({"input": True}, piece)
        return len(piece)

    def flush(self) -> None:
        self._channel.flush()
        if self._channel.unsent:
            raise BlockingIOError

    def read(self) -> bytes:
        if self._over:
            return b""
        try:
            messages = self._channel.receive()
        except BlockingIOError:
            raise
        except OSError as error:
            self._keep(f"{error}\n".encode())
            messages = None
        if messages is None:
            self._over = True
            return b""
        output = b""
        for message in messages:
            if "output" in message.header:
                output += message.body
            elif "errors" in message.header:
                self._keep(message.body)
            elif "exit" in message.header:
                self._code = int(message.header["exit"])
        if not output:
            raise BlockingIOError
        return output

    def read_errors(self) -> bytes:
        said, self._errors = self._errors, b""
        return said

    def abandon(self) -> None:
        self._channel.send({"end": "again" if self.restarts() else "done"})
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """The task itself goes on until `end`, unless it is to start again."""
        if self.restarts():
            self.end("again")

    def wait(self) -> int:
        return -9 if self._code is None else self._code

    def describe_end(self, code: int) -> str:
        if self._code is None:
            return "its Spark task or its executor ended"
        return f"the agent in its Spark task ended with exit code {code}"

    # -- for the server --------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the task still holds its connection, as far as can be told without reading."""
        sock = self._channel.socket
        try:
            waiting = select.select([sock], [], [], 0)[0]
            return not waiting or bool(sock.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):  # it was closed meanwhile
            return False

    @property
    def holds_task(self) -> bool:
        """Whether a task is at the other end: also one whose agent has ended, which waits then."""
        return not self._closed and (self._code is not None or self.is_alive)

    def end(self, how: str) -> None:
        """Let the task end; see `channel` for how."""
        if self._closed:
            return
        self._closed = self._over = True
        self._channel.send({"end": how})
        os.close(self._input_fd)
        self._channel.close()

    def _keep(self, said: bytes) -> None:
        self._errors = (self._errors + said)[-_KEPT_ERRORS:]


def _ends(channel: DriverChannel) -> tuple[str, str]:
    here, there = channel.socket.getsockname(), channel.socket.getpeername()
    return str(here[0]).removeprefix("::ffff:"), str(there[0]).removeprefix("::ffff:")
