"""``horovodrun``: from the command line to the exit status.

The console script and ``python -m horovod.runner`` call `run_commandline`. Everything here is
cheap to import (no framework): workers start within a fraction of a second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import BinaryIO

import horovod
from horovod.common.store import StoreServer
from horovod.common.wire import new_key
from horovod.runner.arguments import parse_args
from horovod.runner.console import Console
from horovod.runner.hosts import Slot, plan_slots
from horovod.runner.report import describe_failure, exit_status
from horovod.runner.supervise import Supervisor
from horovod.runner.tunables import chosen, without_effect
from horovod.runner.worker_env import (
    KEY,
    Meeting,
    common_variables,
    slot_variables,
    terminal_variables,
    threads_per_worker,
    usable_cores,
)
from horovod.runner.workers import WorkerSpec, start_workers

_LOOPBACK = "127.0.0.1"


class LaunchError(Exception):
    """The job cannot be started; the message is for the person who typed the command."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def run_commandline(argv: Sequence[str] | None = None) -> int:
    """Run ``horovodrun`` with these arguments (the process's own by default)."""
    options = parse_args(argv)
    if options.version:
        print(horovod.__version__)
        return 0
    if options.check_build:
        from horovod.runner.check_build import check_build  # rarely needed, so not at every start

        print(check_build(verbose=options.verbose))
        return 0
    console = Console(timestamps=options.prefix_timestamp)
    try:
        return _run_job(options, console)
    except LaunchError as error:
        console.say(str(error))
        return error.status
    except KeyboardInterrupt:  # before the supervisor took the signals over
        return 130


def _run_job(options: argparse.Namespace, console: Console) -> int:
    executable = _find(options.command[0])
    try:
        slots = plan_slots(options.hosts, options.num_proc)
    except ValueError as error:
        raise LaunchError(str(error), status=2) from None
    with ExitStack() as stack:
        copies = _open_copies(options.output_filename, slots, stack)
        meeting = _open_meeting(stack)
        env = _environment(options, slots, meeting, console)
        if options.verbose:
            _describe(options.command, slots, env, console)
        try:
            workers = start_workers(
                executable,
                options.command,
                env,
                [WorkerSpec(slot.rank, slot_variables(slot)) for slot in slots],
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start {len(slots)} workers: {error.strerror} (each takes two pipes; "
                f"'ulimit -n' limits how many descriptors a process may have)"
            ) from None
        stack.callback(workers.close)
        supervisor = Supervisor(workers, console, copies, verbose=options.verbose)
        outcome = supervisor.run()
    if outcome.problem:
        console.say(outcome.problem)
    first = outcome.first_failure
    if first is not None:
        log = copies[first.rank, "stderr"].name if copies else None
        tail = supervisor.stderr_tail(first.rank)
        console.write(describe_failure(outcome, slots[first.rank].hostname, tail, log))
    return exit_status(outcome)


def _find(command: str) -> str:
    """The executable that ``command`` names, as a shell would find it."""
    found = shutil.which(command)
    if found:
        return found
    if not os.path.exists(command):
        raise LaunchError(f"command not found: {command!r}", status=127)
    if os.path.isdir(command):
        raise LaunchError(f"{command!r} is a directory, not a command", status=126)
    hint = f"python {command}" if command.endswith(".py") else f"./{command.removeprefix('./')}"
    if os.access(command, os.X_OK):
        raise LaunchError(
            f"command not found: {command!r} is here but not on PATH; did you mean {hint!r}?",
            status=127,
        )
    why = f"did you mean {hint!r}?" if command.endswith(".py") else "is the execute bit missing?"
    raise LaunchError(f"{command!r} is not executable; {why}", status=126)


def _open_copies(
    directory: str | None, slots: Sequence[Slot], stack: ExitStack
) -> dict[tuple[int, str], BinaryIO]:
    """DIR/rank.<n>/stdout and stderr for every rank, numbers padded to the same width."""
    copies: dict[tuple[int, str], BinaryIO] = {}
    if directory is None:
        return copies
    width = len(str(len(slots) - 1))
    try:
        for slot in slots:
            folder = os.path.join(directory, f"rank.{slot.rank:0{width}d}")
            os.makedirs(folder, exist_ok=True)
            for stream in ("stdout", "stderr"):
                file = open(os.path.join(folder, stream), "wb", buffering=0)  # noqa: SIM115
                copies[slot.rank, stream] = stack.enter_context(file)
    except OSError as error:
        raise LaunchError(
            f"argument --output-filename: cannot write {error.filename!r}: {error.strerror}",
            status=2,
        ) from None
    return copies


def _open_meeting(stack: ExitStack) -> Meeting:
    """The store where the ranks meet, served by this process while the job runs."""
    key = new_key()
    server = StoreServer(_LOOPBACK, key)
    stack.callback(server.close)
    with socket.create_server((_LOOPBACK, 0)) as probe:
        free_port = probe.getsockname()[1]
    return Meeting(_LOOPBACK, server.port, free_port, key)


def _environment(
    options: argparse.Namespace, slots: Sequence[Slot], meeting: Meeting, console: Console
) -> dict[str, str]:
    """What all workers get: the launcher's own environment, options, and the meeting place."""
    values = chosen(options)
    for name, why in without_effect(values, os.environ).items():
        console.say(why)
        del values[name]
    env = {**os.environ, **values, **common_variables(meeting)}
    if console.is_terminal:
        env.update(terminal_variables(console.width, os.environ))
    if not os.environ.get("OMP_NUM_THREADS"):
        local_size = slots[0].local_size
        threads = threads_per_worker(local_size)
        env["OMP_NUM_THREADS"] = str(threads)
        console.say(
            f"OMP_NUM_THREADS={threads} for each worker ({usable_cores()} cores, {local_size} "
            f"workers); set it yourself to choose otherwise"
        )
    return env


def _describe(
    command: Sequence[str], slots: Sequence[Slot], env: dict[str, str], console: Console
) -> None:
    console.say(f"running {list(command)!r} as {len(slots)} processes")
    for slot in slots:
        console.say(f"rank {slot.rank}: {slot.hostname}, local rank {slot.local_rank}")
    for name in sorted(env):
        if name.startswith(("HOROVOD_", "MASTER_")) and name != KEY:
            console.say(f"{name}={env[name]}")


if __name__ == "__main__":
    sys.exit(run_commandline())
