"""The line to an agent over a connection that its host has opened: an `AgentLink`.

`link_server` makes one when a host has connected: one that joined (`joining`) or a Spark task
(`horovod.spark.task_link`). `host_agent` speaks through it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Sequence

from horovod.runner.agents.channel import LinkChannel
from horovod.runner.agents.host_agent import HostAgent, agent_source

_CHUNK = 1 << 18
_KEPT_ERRORS = 8000


class ChannelLink:
    """The launcher's end of the line; see `agent_link.AgentLink`."""

    remote = True
    keeps: Sequence[str] | None = None
    pid = 0  # on another machine

    def __init__(self, channel: LinkChannel) -> None:
        self.restarts: Callable[[], bool] = lambda: False
        """Whether the host should connect again when its agent is released."""
        self._channel = channel
        self._input_fd = os.dup(channel.socket.fileno())  # a selector takes a number only once
        self._ends = channel_ends(channel)
        self._errors = b""
        self._code: int | None = None
        self._closed = False
        self._over = False

    def start_agent(self, name: str) -> HostAgent:
        """The agent at the other end, with that name."""
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
            raise BrokenPipeError("the other end has gone")
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
        """The host itself stays connected until `end`, unless it is to connect again."""
        if self.restarts():
            self.end("again")

    def wait(self) -> int:
        return -9 if self._code is None else self._code

    def describe_end(self, code: int) -> str:
        if self._code is None:
            return "its connection ended"
        return f"its agent ended with exit code {code}"

    # -- for the server --------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the host still holds its connection, as far as can be told without reading."""
        sock = self._channel.socket
        try:
            waiting = select.select([sock], [], [], 0)[0]
            return not waiting or bool(sock.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):  # it was closed meanwhile
            return False

    @property
    def holds_host(self) -> bool:
        """Whether a host is at the other end: also one whose agent has ended, which waits then."""
        return not self._closed and (self._code is not None or self.is_alive)

    def end(self, how: str) -> None:
        """Let the host go; see `channel` for how."""
        if self._closed:
            return
        self._closed = self._over = True
        self._channel.send({"end": how})
        os.close(self._input_fd)
        self._channel.close()

    def _keep(self, said: bytes) -> None:
        self._errors = (self._errors + said)[-_KEPT_ERRORS:]


def channel_ends(channel: LinkChannel) -> tuple[str, str]:
    """The launcher's address and the host's."""
    here, there = channel.socket.getsockname(), channel.socket.getpeername()
    return str(here[0]).removeprefix("::ffff:"), str(there[0]).removeprefix("::ffff:")
