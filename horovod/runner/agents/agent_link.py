"""The line between the launcher and the agent of one host.

`host_agent.HostAgent` speaks through an `AgentLink` and does not know how it works. `ProcessLink`
is the ordinary one: pipes to a child process, which is the agent itself or the command that leads
to it (see `starters`). Hosts that connect by themselves have a `channel.ChannelLink`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Protocol

from horovod.runner.agents.starters import Starter

_CHUNK = 1 << 18
_STARTER_PATIENCE = 5.0

NO_INPUT = 93
"""Exit status of an agent whose source did not come."""


class AgentLink(Protocol):
    """The line to an agent.

    It never blocks: `read`, `read_errors` and `write` raise `BlockingIOError` instead.
    """

    remote: bool
    """Whether the agent may be on another machine, where its processes cannot be signalled."""

    own_variables: Sequence[str] | None
    """Variables that workers take from their host's own environment. None stands for all; the job's
    key is then among them."""

    pid: int

    @property
    def input_fd(self) -> int:
        """A descriptor that is writable when `write` or `flush` can go on."""

    @property
    def output_fd(self) -> int:
        """A descriptor, other than `input_fd`, that is readable when `read` has something."""

    @property
    def errors_fd(self) -> int | None:
        """A descriptor that is readable when `read_errors` has something.

        None where `read` brings the errors too.
        """

    @property
    def unsent(self) -> bool:
        """Whether bytes that `write` took are still here."""

    @property
    def ends(self) -> tuple[str, str]:
        """The addresses of both ends of the connection, launcher first; empty if unknown."""

    def write(self, data: memoryview) -> int:
        """Send some of the data, and return how many bytes were taken."""

    def flush(self) -> None:
        """Send bytes that are still here."""

    def read(self) -> bytes:
        """Return bytes from the agent; none at its end."""

    def read_errors(self) -> bytes:
        """Return error text from the agent or the command that leads to it; none at the end."""

    def abandon(self) -> None:
        """Give the agent up; `read` then comes to an end."""

    def release(self) -> None:
        """Close our side. An agent that still runs then ends its workers, and itself."""

    def wait(self) -> int:
        """Wait for the end after `release`; return an exit code, negative for signals."""

    def describe_end(self, code: int) -> str:
        """Return a sentence for people about a link that ended by itself with this code."""


class ProcessLink:
    """Pipes to a child process."""

    unsent = False
    ends = ("", "")  # the agent says what ssh or Slurm has told it

    def __init__(self, command: Sequence[str], starter: Starter | None) -> None:
        """Start the process.

        Args:
            command: The command to execute.
            starter: What leads to another machine; None if the process is the agent itself.

        Raises:
            OSError: If the process cannot be started.
        """
        self.remote = starter is not None
        self.own_variables: Sequence[str] | None = starter.own_variables if starter else ()
        self._name = starter.name if starter else "the agent"
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=starter.environment() if starter else None,
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher alone
        )
        self.pid = self._process.pid
        for fd in (self.input_fd, self.output_fd, self.errors_fd):
            os.set_blocking(fd, False)

    @property
    def input_fd(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    @property
    def output_fd(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def errors_fd(self) -> int:
        assert self._process.stderr is not None
        return self._process.stderr.fileno()

    def write(self, data: memoryview) -> int:
        return os.write(self.input_fd, data)

    def flush(self) -> None:
        pass

    def read(self) -> bytes:
        return os.read(self.output_fd, _CHUNK)

    def read_errors(self) -> bytes:
        return os.read(self.errors_fd, _CHUNK)

    def abandon(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def release(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def wait(self) -> int:
        try:
            return self._process.wait(_STARTER_PATIENCE if self.remote else None)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the agent ends by itself when it loses us
            return self._process.wait()

    def describe_end(self, code: int) -> str:
        if code == NO_INPUT:
            return (
                f"{self._name} does not pass its stdin on to the host, over which the agent there "
                f"gets its orders (kubectl exec does with -i); horovodrun --listen and --join need "
                f"none. {self._name} ended with exit code {code}"
            )
        return f"{self._name} ended with exit code {code}"
