"""Running one shell command, with its output passed on and an end for all that it starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from horovod.runner.agents.processes import find_descendants, signal_all, signal_groups
from horovod.runner.output.console import Source
from horovod.runner.output.lines import LineSplitter

GRACEFUL_TERMINATION_TIME_S = 5
_LOOK_SECONDS = 0.1


def execute(
    command: str | Sequence[str],
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    index: int | None = None,
    events: Sequence[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Run a command (text: by a shell) to its end; its exit status, 128+n after signal n.

    Output goes to `stdout` and `stderr`, by default those of this process, with
    ``[index]<stream>:`` before each line if there is an `index`. When one of `events` is set, or
    this call is interrupted, the command and everything it started are ended.
    """
    process = subprocess.Popen(
        command,
        shell=isinstance(command, str),
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    writers = {"stdout": stdout or sys.stdout, "stderr": stderr or sys.stderr}
    pumps = [
        threading.Thread(
            target=_pump,
            args=(getattr(process, name), out, index, name, prefix_output_with_timestamp),
        )
        for name, out in writers.items()
    ]
    for pump in pumps:
        pump.start()
    try:
        code = _wait(process, events or ())
    finally:
        terminate_executor_shell_and_children(process.pid)
        process.wait()
        for pump in pumps:
            pump.join()
    return code if code >= 0 else 128 - code


def terminate_executor_shell_and_children(pid: int) -> None:
    """End a process that leads a session, with all that it started: asked first, then killed."""
    members = find_descendants(pid)
    signal_all(members, signal.SIGKILL)
    signal_groups([pid], signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], events: Sequence[threading.Event]) -> int:
    while True:
        try:
            return process.wait(_LOOK_SECONDS if events else None)
        except subprocess.TimeoutExpired:
            if not any(event.is_set() for event in events):
                continue
        signal_groups([process.pid], signal.SIGTERM)
        try:
            return process.wait(GRACEFUL_TERMINATION_TIME_S)
        except subprocess.TimeoutExpired:
            terminate_executor_shell_and_children(process.pid)
            return process.wait()


def _pump(pipe: Any, out: TextIO, index: int | None, stream: str, timestamps: bool) -> None:
    source = None if index is None else Source(index, stream)
    splitter = LineSplitter()
    while True:
        data = pipe.read1(1 << 16)
        lines = splitter.feed(data) if data else splitter.finish()
        for line in lines:
            shown = (source.line_prefix(timestamps) if source else b"") + line.text + line.end
            out.write(shown.decode(errors="replace"))
        out.flush()
        if not data:
            pipe.close()
            return
