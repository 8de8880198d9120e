"""Connections that hosts open to the launcher: hosts that join a job, and Spark tasks.

A `LinkChannel` is one end of such a connection; it is authenticated and never blocks. `relay` has
one on the host. In the launcher `link_server` makes a `ChannelLink` around it, which is the
`starters.AgentLink` through which `host_agent` speaks. The protocol is `horovod.common.wire`'s.
The launcher sends these messages:

- ``{"agent": length}``: start an agent; its source, ``length`` bytes, follows as input
- ``{"input": true}`` with bytes for the agent's stdin
- ``{"end": "done"}``: the host is not needed any more; ``{"end": "again"}``: it should connect once
  more, as another host; ``{"end": "refused", "why": text}``: it cannot take part.

A host first describes itself (as `link_server.JoinServer` or `horovod.spark.task_link` expects),
then sends ``{"output": true}`` and ``{"errors": true}`` with bytes of the agent's stdout and
stderr, and at last ``{"exit": code}``.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.common.wire import Message, Session
from horovod.runner.agents.agent_streams import write_unsent
from horovod.runner.agents.host_agent import HostAgent, agent_source

_CHUNK = 1 << 18
_KEPT_ERRORS = 8000  # bytes
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""With these the kernel notices after a minute that a peer's machine has gone."""


class LinkChannel:
    """A socket and the state of the protocol on it."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.socket = sock
        self.session = session
        self._unsent = bytearray()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._unsent += session.take_output()

    @property
    def unsent(self) -> int:
        """Bytes that wait for room in the socket."""
        return len(self._unsent)

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived, or None at the end of the connection.

        A handshake may leave bytes for `flush` to send.

        Raises:
            BlockingIOError: If nothing has arrived.
            OSError: If the connection is broken.
        """
        data = self.socket.recv(_CHUNK)
        if not data:
            return None
        try:
            return self.session.feed(data)
        finally:
            self._unsent += self.session.take_output()

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send as much as the socket takes; `flush` sends the rest."""
        self._unsent += self.session.seal(header, body)
        self.flush()

    def flush(self) -> None:
        """Send as much of the rest as the socket takes; `receive` reports a broken connection."""
        write_unsent(self.socket.fileno(), self._unsent)

    def finish(self) -> None:
        """Send nothing more; the peer's `receive` then comes to its end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()


class ChannelLink:
    """The launcher's end of such a connection: a `starters.AgentLink`."""

    remote = True
    own_variables: Sequence[str] | None = None
    pid = 0  # on another machine
    errors_fd = None

    def __init__(self, channel: LinkChannel) -> None:
        self.restarts: Callable[[], bool] = lambda: False
        """Whether the host should connect again when its agent is released."""
        here, there = channel.socket.getsockname(), channel.socket.getpeername()
        self.ends = unmapped(here), unmapped(there)
        self.input_fd = os.dup(channel.socket.fileno())  # a selector takes a number only once
        self._channel = channel
        self._errors = b""
        self._code: int | None = None
        self._closed = False
        self._over = False

    def start_agent(self, name: str) -> HostAgent:
        """Start an agent on the host, and return it with this name."""
        self._channel.send({"agent": len(agent_source(0))})
        return HostAgent(name, link=self)

    # -- for HostAgent ---------------------------------------------------------------------

    @property
    def output_fd(self) -> int:
        return self._channel.socket.fileno()

    @property
    def unsent(self) -> bool:
        return self._channel.unsent > 0

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
        except BlockingIOError:  # an OSError, too, but not a broken connection
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
        """Let the agent go. The host stays connected until `end`, unless it is to reconnect."""
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
        """Whether the host still holds its connection; nothing is read from it to find out."""
        try:
            return bool(self._channel.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:  # it is broken, or was closed meanwhile
            return False

    @property
    def holds_host(self) -> bool:
        """Whether a host is at the other end, even one that waits because its agent has ended."""
        return not self._closed and (self._code is not None or self.is_alive)

    def end(self, how: str) -> None:
        """Let the host go; ``how`` is the value of the message "end"."""
        if self._closed:
            return
        self._closed = self._over = True
        self._channel.send({"end": how})
        os.close(self.input_fd)
        self._channel.close()

    def _keep(self, said: bytes) -> None:
        self._errors = (self._errors + said)[-_KEPT_ERRORS:]


def unmapped(endpoint: Sequence[Any]) -> str:
    """Return the address of a socket's end, and an IPv4 address as such."""
    return str(endpoint[0]).removeprefix("::ffff:")
