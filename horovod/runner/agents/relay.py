"""The process that brings its own host into a job: it runs an agent behind a connection.

``horovodrun --join`` and Spark's tasks call `connect` and then run a `Relay`. It starts the agent
that the launcher sends, and passes bytes between the two until the launcher lets the host go. The
agent starts the workers, and ends everything that is left of them when this process ends.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from horovod.common.wire import Message, Session
from horovod.runner.agents.channel import LinkChannel
from horovod.runner.agents.host_agent import agent_arguments

_CHUNK = 1 << 16
_MOST_UNSENT = 4 << 20  # bytes, beyond which the agent's output waits in its pipe


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
    """Passes bytes between the launcher and the agent."""

    def __init__(self, channel: LinkChannel, env: Mapping[str, str]) -> None:
        """Prepare to relay; ``env`` will be the agent's environment."""
        self.why = ""  # what the launcher said when it let the host go
        self._channel = channel
        self._env = env
        self._agent: subprocess.Popen[bytes] | None = None
        self._input = bytearray()
        self._sources: dict[int, str] = {}  # the agent's open streams, and their messages
        self._is_finished = False  # nothing more will be sent
        self._end: str | None = None  # the value of the message "end", or "gone"

    def run(self) -> str:
        """Pass bytes on until the launcher lets the host go.

        Returns:
            The value of the launcher's message "end" (see `channel`).

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
            if self._input and self._agent is not None and self._agent.stdin is not None:
                selector.register(self._agent.stdin, selectors.EVENT_WRITE)
            ready = {key.fd for key, _ in selector.select()}
        channel.flush()
        if channel.socket.fileno() in ready:
            self._take()
        for fd in list(self._sources):
            if fd in ready:
                self._pass_on(fd)
        self._write_input()
        if self._is_finished and not channel.unsent:
            self._is_finished = False
            channel.finish()

    def terminate(self) -> bool:
        """Ask the agent to end its workers and itself. A signal handler may call this.

        Returns:
            Whether an agent runs.
        """
        if self._agent is None or self._agent.returncode is not None:
            return False
        self._agent.terminate()
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
        for message in messages:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        if "agent" in message.header:
            self._start_agent(int(message.header["agent"]))
        elif "end" in message.header:
            self._end = str(message.header["end"])
            self.why = str(message.header.get("why", ""))
        else:
            self._input += message.body

    def _start_agent(self, length: int) -> None:
        self._agent = subprocess.Popen(
            [sys.executable, *agent_arguments(length)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a signal to our session must not end the agent: it tidies up
            env=self._env,
        )
        for pipe in (self._agent.stdin, self._agent.stdout, self._agent.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        assert self._agent.stdout is not None
        assert self._agent.stderr is not None
        self._sources = {
            self._agent.stdout.fileno(): "output",
            self._agent.stderr.fileno(): "errors",
        }

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

    def _write_input(self) -> None:
        if self._agent is None or self._agent.stdin is None:
            return
        try:
            while self._input:
                del self._input[: os.write(self._agent.stdin.fileno(), self._input[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self._input.clear()  # the agent has ended, which its other pipes report

    def _end_agent(self) -> None:
        """Close the agent's stdin, upon which it ends all workers, and wait for its end."""
        if self._agent is None:
            return
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        for pipe in (self._agent.stdout, self._agent.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), True)
            while pipe.read(_CHUNK):
                pass  # read to the end, so that the agent does not block on a full pipe
            pipe.close()
        self._agent.wait()
