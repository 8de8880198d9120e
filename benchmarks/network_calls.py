"""Single allreduces and the start of jobs, for benchmarks/network.py: ranks are led by turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.network_hosts import cores
from benchmarks.processes import ROOT, Group, group, limit
from benchmarks.training_jobs import Place, temporary_folder
from benchmarks.turns import Samples, race

RIVALS = ["ours", "gloo"]
PAIRS = [("gloo", "ours")]
TURN_CALLS = 10  # at most
TURN_SECONDS = 0.25
WARM_UP_TURNS = 2
PAUSE = 0.0005  # seconds between calls, beside half of what they take
START_REPEATS = 3


def call_times(start: float, every: float, ends: list[list[float]]) -> list[float]:
    """Microseconds of each call on the slowest rank, from the moments at which ranks were done.

    A call begins when it is due, or when the slowest rank is done with the one before.
    """
    times, free = [], start
    for number, moments in enumerate(zip(*ends, strict=True)):
        begin = max(free, start + number * every)
        free = max(moments)
        times.append(1e6 * (free - begin))
    return times


def head_start(size: int) -> float:
    """Seconds until a turn begins: by then all ranks know of it."""
    return 0.005 + 0.0003 * size


class Caller:
    """Has a group call in turns."""

    def __init__(self, job: Group, size: int) -> None:
        self._job = job
        self._head_start = head_start(size)
        self._every, self._calls = 0.0, 1

    def prepare(self, nbytes: int) -> None:
        self._job.ask({"do": "prepare", "nbytes": nbytes})
        self._every, self._calls = 0.0, 1
        for _ in range(WARM_UP_TURNS):
            self.turn()

    def turn(self) -> float:
        """Microseconds of a call, the median of a turn."""
        start = time.monotonic() + self._head_start
        order = {"start": start, "every": self._every, "calls": self._calls}
        times = call_times(start, self._every, self._job.ask({"do": "call", **order}))
        self._every = 1.5e-6 * median(times) + PAUSE
        self._calls = max(1, min(TURN_CALLS, int(TURN_SECONDS / self._every)))
        return median(times)


@dataclass
class CallJobs:
    """Starts the ranks of one setting, which call when told to."""

    place: Place
    size: int
    bind: bool
    seconds: float  # most time for a size
    timeout: float
    knobs: Mapping[str, str]  # for ours

    @contextmanager
    def _job(self, contender: str, folder: str) -> Iterator[Group]:
        plan = {"contender": contender, "bind": self.bind, "crowded": self.size > cores()}
        program = [sys.executable, str(ROOT / "benchmarks" / "network_rank.py"), json.dumps(plan)]
        commands = self.place(program, self.knobs if contender == "ours" else {})
        output = Path(folder, f"allreduce of {contender}")
        with group(commands, output) as job:
            yield job

    def _at_once(self, job: Group, what: str) -> float:
        """Milliseconds of the slowest rank from a common start."""
        answers: list[Any] = job.ask(
            {"do": what, "start": time.monotonic() + head_start(self.size)}
        )
        return max(answers)

    def allreduce(self, sizes: list[int]) -> Iterator[tuple[int, Samples]]:
        """Microseconds of a call for each size, a sample a turn."""
        with ExitStack() as running:
            folder = running.enter_context(temporary_folder())
            callers = {}
            for name in RIVALS:
                with limit(self.timeout):
                    job = running.enter_context(self._job(name, folder))
                    self._at_once(job, "load")
                    self._at_once(job, "start")
                    callers[name] = Caller(job, self.size)
            for nbytes in sizes:
                with limit(self.timeout):
                    for caller in callers.values():
                        caller.prepare(nbytes)
                    turns = {name: caller.turn for name, caller in callers.items()}
                    samples = race(turns, PAIRS, self.seconds)
                yield nbytes, samples

    def starts(self) -> dict[str, dict[str, list[float]]]:
        """Milliseconds to load and to start each library after `import torch`, a few times."""
        found: dict[str, dict[str, list[float]]] = {
            name: {"load": [], "start": []} for name in RIVALS
        }
        for _ in range(START_REPEATS):
            for name in RIVALS:
                with (
                    limit(self.timeout),
                    temporary_folder() as folder,
                    self._job(name, folder) as job,
                ):
                    for what, samples in found[name].items():
                        samples.append(self._at_once(job, what))
        return found
