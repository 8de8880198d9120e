"""What the benchmarks have in common: starting ranks, following them, and a progress bar."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = re.compile(  # who a process is; knobs such as HOROVOD_CPU_OPERATIONS stay
    r"_HOROVOD_|HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_RENDEZVOUS_|CONTROLLER)"
    r"|OMPI_COMM_|PMI|PRTE_|SLURM_|JSM_|TORCHELASTIC_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def environment(**more: str) -> dict[str, str]:
    """Ours without traces of another launcher, and one thread per rank."""
    environ = {name: v for name, v in os.environ.items() if not LAUNCHERS.match(name)}
    paths = [str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    environ.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: as fast as Gloo gets
    return environ | more


def torchrun_environments(size: int) -> list[dict[str, str]]:
    """What torchrun would give to each of `size` ranks on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        environment(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        for rank in range(size)
    ]


@contextmanager
def processes(
    commands: list[tuple[list[str], dict[str, str]]], **options: object
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start them, each in a group of its own that is ended when the block is left early."""
    started: list[subprocess.Popen[str]] = []
    try:
        for command, environ in commands:
            started.append(
                subprocess.Popen(  # type: ignore[call-overload]
                    command, env=environ, text=True, start_new_session=True, **options
                )
            )
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def follow(
    commands: list[tuple[list[str], dict[str, str]]],
    output: Path,
    timeout: float,
    advance: Callable[[str], None],
) -> None:
    """Wait for the ranks, telling `advance` what they finish; SystemExit when one fails."""
    deadline = time.monotonic() + timeout
    with (
        output.open("w") as sink,
        output.open() as source,
        processes(commands, stdout=sink, stderr=subprocess.STDOUT) as running,
    ):
        while True:
            ended = [process.poll() for process in running]
            for line in source:
                if line.startswith("done "):
                    advance(line.removeprefix("done ").strip())
            if any(ended) or time.monotonic() > deadline:
                why = "A rank failed" if any(ended) else f"No end after {timeout:g} s"
                sys.exit(f"\n{why}. Its output:\n\n{output.read_text().strip()}")
            if None not in ended:
                return
            time.sleep(0.1)


class Progress:
    """A bar on standard error where that is a terminal, and nothing otherwise."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.shown = sys.stderr.isatty()

    def show(self, what: str) -> None:
        if self.shown:
            filled = 30 * self.done // self.total
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r\x1b[K[{bar}] {self.done}/{self.total} {what}", end="", file=sys.stderr)
            sys.stderr.flush()

    def advance(self, what: str) -> None:
        self.done += 1
        self.show(what)

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
