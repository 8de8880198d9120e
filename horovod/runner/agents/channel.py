"""Connections that hosts open to the launcher: hosts that join a job, and Spark tasks.

A `LinkChannel` is one end of such a connection; it is authenticated and never blocks. On the host
``horovodrun --join`` and Spark's tasks call `connect` and then run a `Relay`. It starts the agent
that the launcher sends, and passes bytes between the two until the launcher lets the host go. In
the launcher `link_server` makes a `ChannelLink` around the channel, through which `host_agent`
speaks. The protocol is `horovod.common.wire`'s. The launcher sends these messages:

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
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.common.wire import Message, Session
from horovod.runner.agents.agent_streams import write_unsent
from horovod.runner.agents.starters import ProcessLink, agent_arguments

_CHUNK = 1 << 18
_MOST_UNSENT = 4 << 20  # bytes, beyond which the agent's output waits in its pipe
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


# -- the host -----------------------------------------------------------------------------------


def connect(address: str, port: int, key: bytes, timeout: float) -> LinkChannel:
    """Connect to the launcher.

    Args:
        address: The launcher's address.
        port: The launcher's port.
        key: The job's secret.
        timeout: Seconds to wait; the launcher may be busy accepting hundreds of hosts.

    Returns:
        The connection, after both sides have proved that they know the key.

    Raises:
        OSError: If there is no connection within the time; `TimeoutError` is one.
    """
    deadline = time.monotonic() + timeout
    sock = socket.create_connection((address, port), timeout)
    channel = LinkChannel(sock, Session(key, server=False))
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while not channel.session.established:
                channel.flush()
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError(f"no answer within {timeout:g} s")
                if channel.receive() is None:
                    raise ConnectionResetError("the connection was closed without an answer")
        channel.flush()
    except BaseException:
        channel.close()
        raise
    return channel


class Relay:
    """Passes bytes between the launcher and the agent that it has started here.

    The agent starts the workers, and ends what is left of them when this process ends.
    """

    def __init__(self, channel: LinkChannel, env: Mapping[str, str]) -> None:
        """Prepare to relay; ``env`` will be the agent's environment."""
        self.why = ""  # what the launcher said when it let the host go
        self._channel = channel
        self._env = env
        self._agent: ProcessLink | None = None
        self._input = bytearray()
        self._sources: dict[int, str] = {}  # the agent's open streams, and their messages
        self._is_finished = False  # nothing more will be sent
        self._end: str | None = None  # the value of the message "end", or "gone"

    def run(self) -> str:
        """Pass bytes on until the launcher lets the host go.

        Returns:
            The value of the launcher's message "end".

        Raises:
            ConnectionError: If the launcher is gone.
        """
        try:
            while self._end is None:
                self._wait_and_pass()
        finally:
            self._end_agent()
        if self._end == "gone":
            raise ConnectionError("the launcher is gone, and with it the job")
        return self._end

    def _wait_and_pass(self) -> None:
        channel = self._channel
        with selectors.DefaultSelector() as selector:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.unsent else 0)
            selector.register(channel.socket, events)
            if channel.unsent < _MOST_UNSENT:
                for fd in self._sources:
                    selector.register(fd, selectors.EVENT_READ)
            if self._input and self._agent is not None:
                selector.register(self._agent.input_fd, selectors.EVENT_WRITE)
            ready = {key.fd for key, _ in selector.select()}
        channel.flush()
        if channel.socket.fileno() in ready:
            self._take()
        for fd in list(self._sources):
            if fd in ready:
                self._pass_on(fd)
        if self._agent is not None:
            write_unsent(self._agent.input_fd, self._input)
        if self._is_finished and not channel.unsent:
            self._is_finished = False
            channel.finish()

    def terminate(self) -> bool:
        """Ask the agent to end its workers and itself. A signal handler may call this.

        Returns:
            Whether an agent runs.
        """
        if self._agent is None or self._agent.process.returncode is not None:
            return False
        self._agent.process.terminate()
        return True

    def _take(self) -> None:
        try:
            messages = self._channel.receive()
        except BlockingIOError:
            return
        except OSError:  # a WireError is one
            messages = None
        if messages is None:
            self._end = "gone"
            return
        for header, body in messages:
            if "agent" in header:
                self._start_agent(int(header["agent"]))
            elif "end" in header:
                self._end = str(header["end"])
                self.why = str(header.get("why", ""))
            else:
                self._input += body

    def _start_agent(self, length: int) -> None:
        command = [sys.executable, *agent_arguments(length)]
        self._agent = ProcessLink(command, None, self._env)
        self._sources = {self._agent.output_fd: "output", self._agent.errors_fd: "errors"}

    def _pass_on(self, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self._channel.send({self._sources[fd]: True}, data)
            return
        del self._sources[fd]
        if not self._sources:
            assert self._agent is not None
            self._channel.send({"exit": self._agent.wait()})
            self._is_finished = True

    def _end_agent(self) -> None:
        """Close the agent's stdin, upon which it ends all workers, and wait for its end."""
        if self._agent is None:
            return
        stdin, *sources = self._agent.pipes
        stdin.close()
        for pipe in sources:
            os.set_blocking(pipe.fileno(), True)
            while pipe.read(_CHUNK):
                pass  # read to the end, so that the agent does not block on a full pipe
            pipe.close()
        self._agent.wait()


# -- the launcher -------------------------------------------------------------------------------


class ChannelLink:
    """The launcher's end of such a connection, with the methods of `starters.ProcessLink`."""

    remote = True
    own_variables: Sequence[str] | None = None
    pid = 0  # on another machine
    errors_fd = None
    connection_ended = "its connection ended"  # for people, as the next
    agent = "its agent"

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

    # -- for HostAgent ---------------------------------------------------------------------

    def announce_agent(self, length: int) -> None:
        """Tell the host to start an agent, whose source of this length follows."""
        self._channel.send({"agent": length})

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
            return self.connection_ended
        return f"{self.agent} ended with exit code {code}"

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
