"""The ranks of benchmarks/training.py that are timed: each contender has processes of its own.

So each is what a user would run: nothing of another contender is loaded, runs or has arranged the
memory. The ranks of all contenders are started, and then wait for their turns, one contender at a
time; the other end of this conversation is in `benchmarks.training_rank`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from benchmarks.processes import processes

Commands: TypeAlias = list[tuple[list[str], dict[str, str]]]

ROUNDS = (5, 200)  # turns of each contender, at least and at most
HEAD_START = 0.005  # seconds until a turn begins: all ranks are awake by then
GOODBYE = 30.0  # seconds in which ranks end that have been told to


class Silence(Exception):
    """A rank has ended, or was ended, instead of answering."""


class Team:
    """The ranks of one contender."""

    def __init__(self, ranks: list[subprocess.Popen[str]]) -> None:
        self.ranks = ranks

    def hear(self) -> list[str]:
        """The next word of every rank."""
        words = [rank.stdout.readline().strip() for rank in self.ranks if rank.stdout]
        if not all(words):
            raise Silence
        return words

    def turn(self) -> float:
        """Milliseconds per step of the slowest rank, from a start that is the same for all."""
        start = time.monotonic() + HEAD_START
        for rank in self.ranks:
            assert rank.stdin is not None
            try:
                print(start, file=rank.stdin, flush=True)
            except BrokenPipeError:
                raise Silence from None
        return max(map(float, self.hear()))

    def dismiss(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(GOODBYE)


def race(
    contenders: list[str],
    commands: Callable[[str], Commands],
    seconds: float,
    output: Path,
    timeout: float,
) -> dict[str, list[float]]:
    """Milliseconds per step of each contender, one sample a turn; SystemExit when a rank fails."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    teams: dict[str, Team] = {}
    with output.open("w") as sink, ExitStack() as stack, deadline(teams, timeout) as is_late:
        try:
            for name in contenders:  # one after the other: who tunes itself needs quiet
                pipe = subprocess.PIPE
                started = processes(commands(name), stdin=pipe, stdout=pipe, stderr=sink)
                teams[name] = Team(stack.enter_context(started))
                teams[name].hear()
            order = list(contenders)
            began = time.monotonic()
            for number in range(1, ROUNDS[1] + 1):
                for name in order:
                    samples[name].append(teams[name].turn())
                order.append(order.pop(0))
                if number >= ROUNDS[0] and time.monotonic() - began > seconds:
                    break
        except Silence:
            why = f"No end after {timeout:g} s" if is_late() else "A rank failed"
            sys.exit(f"\n{why}. Its output:\n\n{output.read_text().strip()}")
        for team in teams.values():
            team.dismiss()
    return samples


@contextmanager
def deadline(teams: dict[str, Team], timeout: float) -> Iterator[Callable[[], bool]]:
    """Kill all ranks when time is up; yields whether that has happened."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        for team in list(teams.values()):
            for rank in team.ranks:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)

    timer = threading.Timer(timeout, give_up)
    timer.start()
    try:
        yield late.is_set
    finally:
        timer.cancel()
