"""Starting and ending the workers of this host, through the guard process.

`launch` starts them with `start_workers`; `supervise` reads their pipes, takes the guard's events
and sends its commands. See `guard` for why there is a process in between, and for the protocol.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_GUARD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guard.py")


@dataclass(frozen=True)
class WorkerSpec:
    """What makes one worker different from the others."""

    rank: int
    env: dict[str, str]


class Workers:
    """The running workers of one host: their pipes, and the line to the guard."""

    def __init__(
        self, process: subprocess.Popen[bytes], outputs: dict[int, tuple[int, str]]
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._commands = process.stdin.fileno()
        self._unread = b""
        self.events_fd = process.stdout.fileno()
        self.outputs = outputs  # descriptor to read -> rank and "stdout" or "stderr"
        self.guard_pid = process.pid

    def events(self) -> list[dict[str, Any]] | None:
        """What the guard has said since; None when it has ended. Blocks until it says more."""
        data = os.read(self.events_fd, 1 << 16)
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self, grace: float) -> None:
        """SIGTERM now and SIGKILL after ``grace`` seconds; 0 kills at once. Safe in a handler."""
        command = json.dumps({"stop": grace}).encode() + b"\n"
        try:
            os.write(self._commands, command)
        except BrokenPipeError:
            pass  # the guard has ended, or died: `events` says which

    def close(self) -> int:
        """End whatever is left and wait for the guard; its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        for fd in self.outputs:
            os.close(fd)
        self.outputs.clear()
        return self._process.wait()


def start_workers(
    executable: str, argv: Sequence[str], env: dict[str, str], specs: Sequence[WorkerSpec]
) -> Workers:
    """Start one worker for each spec, with ``env`` plus its own variables.

    The environment, and with it the job's key, goes to the guard through a pipe.
    """
    outputs: dict[int, tuple[int, str]] = {}
    inherited: list[int] = []
    described = []
    try:
        for spec in specs:
            ends = {}
            for stream in ("stdout", "stderr"):
                read_end, ends[stream] = os.pipe()
                outputs[read_end] = (spec.rank, stream)
                inherited.append(ends[stream])
            described.append({"rank": spec.rank, "env": spec.env, **ends})
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, str(os.getpid())],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher alone
        )
    except BaseException:
        for fd in outputs:
            os.close(fd)
        raise
    finally:
        for fd in inherited:
            os.close(fd)
    workers = Workers(process, outputs)
    job = {"executable": executable, "argv": list(argv), "env": env, "workers": described}
    assert process.stdin is not None
    try:
        _write_all(process.stdin.fileno(), json.dumps(job).encode() + b"\n")
    except BrokenPipeError:
        pass  # the guard could not start; `events` reports its end
    except BaseException:
        workers.close()
        raise
    return workers


def kill_groups(pids: Sequence[int]) -> None:
    """The last resort when the guard itself was killed: end the workers' process groups."""
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
