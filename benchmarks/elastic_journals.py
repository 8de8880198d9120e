"""What the ranks of benchmarks/elastic.py note while they train, and what can be read from it.

A rank appends a line for every step that it has completed: when, among how many ranks, and in which
attempt, counted by the process. After a loss, and when ranks join, a process begins a new attempt.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """A step that a process has completed."""

    time: float  # since the epoch
    size: int  # ranks that took part
    attempt: int  # of the process


class Journal:
    """In a rank: what this process has done."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / str(os.getpid()), "w", buffering=1)  # noqa: SIM115

    def note(self, size: int, attempt: int = 0) -> None:
        self._file.write(f"{time.time():.6f} {size} {attempt}\n")


class Journals:
    """In the benchmark: what all processes of a job have done, those that have ended too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[int, int] = {}
        self.steps: dict[int, list[Step]] = {}  # by process

    def read(self) -> None:
        for path in self._folder.iterdir():
            pid = int(path.name)
            with path.open() as file:
                file.seek(self._offsets.get(pid, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._offsets[pid] = self._offsets.get(pid, 0) + len(whole)
            for line in whole.splitlines():
                moment, size, attempt = line.split()
                step = Step(float(moment), int(size), int(attempt))
                self.steps.setdefault(pid, []).append(step)

    def first(self, pid: int, after: float, size: int) -> float | None:
        """When a process had completed its first step after a moment among so many ranks."""
        steps = self.steps.get(pid, ())
        return next((s.time for s in steps if s.time > after and s.size == size), None)

    def all_stepped(self, after: float, size: int) -> float | None:
        """When `size` processes had completed a step together after a moment."""
        self.read()
        found = [self.first(pid, after, size) for pid in self.steps]
        moments = [moment for moment in found if moment is not None]
        return max(moments) if len(moments) >= size else None

    def attempts(self) -> dict[int, int]:
        """The attempt in which each process is."""
        return {pid: steps[-1].attempt for pid, steps in self.steps.items()}

    def next_step(self, pid: int, attempts: dict[int, int]) -> float | None:
        """When a process had completed a step of a later attempt than it was in.

        A step of the same attempt may end after a rank was killed: that rank had done its part.
        """
        before = attempts.get(pid, -1)
        return next((s.time for s in self.steps.get(pid, ()) if s.attempt > before), None)

    def whole_again(self, attempts: dict[int, int], size: int) -> float | None:
        """When `size` processes had completed such a step all together."""
        self.read()
        moments = []
        for pid, steps in self.steps.items():
            before = attempts.get(pid, -1)
            found = (s.time for s in steps if s.attempt > before and s.size == size)
            moments += [moment for moment in [next(found, None)] if moment is not None]
        return max(moments) if len(moments) >= size else None

    def alive(self, after: float) -> list[int]:
        """The processes that have completed a step after a moment."""
        return [pid for pid, steps in self.steps.items() if steps and steps[-1].time > after]
