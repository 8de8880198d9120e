"""The line between the launcher and the agent of one host.

`host_agent.HostAgent` speaks through an `AgentLink` and does not know what it is made of.
`ProcessLink` is the ordinary one: pipes to a child process, which is the agent itself or what
leads to it (see `starter`). Clusters that start processes themselves bring their own, such as
`horovod.spark.task_link`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Protocol

from horovod.runner.agents.starter import Starter

_CHUNK = 1 << 18
_STARTER_PATIENCE = 5.0

NO_INPUT = 93
"""Exit status of an agent whose source did not come."""


class AgentLink(Protocol):
    """Never blocks: `read`, `read_errors` and `write` raise `BlockingIOError` instead."""

    remote: bool
    """The agent may be on another machine: its processes cannot be signalled from here."""

    keeps: Sequence[str] | None
    """Variables that workers take from their host's own environment. None: all of them, and the
    job's key is among them."""

    pid: int

    @property
    def input_fd(self) -> int:
        """Becomes writable when `write` or `flush` can go on."""

    @property
    def output_fd(self) -> int:
        """Becomes readable when `read` has something; another number than `input_fd`."""

    @property
    def errors_fd(self) -> int | None:
        """Becomes readable when `read_errors` has something; None where `read` brings that too."""

    @property
    def unsent(self) -> bool:
        """Something that `write` took is still here."""

    @property
    def ends(self) -> tuple[str, str]:
        """The launcher's address and the host's, as the connection has them; empty if unknown."""

    def write(self, data: memoryview) -> int:
        """Send some of it; how much was taken."""

    def flush(self) -> None:
        """Send what is still here."""

    def read(self) -> bytes:
        """What the agent said; nothing at its end."""

    def read_errors(self) -> bytes:
        """What was said that is not the agent's protocol; nothing when there is no more."""

    def abandon(self) -> None:
        """Give the agent up; `read` then comes to an end."""

    def release(self) -> None:
        """Close our side: an agent that still runs ends whatever is left, and then itself."""

    def wait(self) -> int:
        """After `release`: an exit code, negative for signals."""

    def describe_end(self, code: int) -> str:
        """What happened when the link ended by itself, for people."""


class ProcessLink:
    """Pipes to a child process."""

    unsent = False
    ends = ("", "")  # the agent says what ssh or Slurm has told it

    def __init__(self, command: Sequence[str], starter: Starter | None) -> None:
        """Without a starter the process is on this machine.

        Raises `OSError` if the process cannot be started.
        """
        self.remote = starter is not None
        self.keeps: Sequence[str] | None = starter.keeps if starter else ()
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
