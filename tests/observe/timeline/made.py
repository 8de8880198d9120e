"""Traces with known answers: a job that is computed, written as its ranks would have recorded it.

`MadeJob` says how long everything took; `recordings` and `write` give what the ranks' files say, on
clocks that may be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod.observe.timeline.recording import Recording, interpret

Event = dict[str, Any]

ROW = "allreduce.DistributedOptimizer.0.bucket 1 of 1 (b to a)"
OPTIMIZER = "DistributedOptimizer.0"


@dataclass
class Clock:
    """A host's: how far it is off, and how many microseconds it gains in a second."""

    offset: float = 0.0
    drift: float = 0.0
    epoch: int = 1_700_000_000_000_000

    def read(self, time: float) -> float:
        return time + self.offset + self.drift * time / 1e6


@dataclass
class MadeJob:
    """Times in microseconds. Lists over steps, then over ranks."""

    compute: Sequence[Sequence[float]]
    reduction: Sequence[float]
    agreeing: float = 50.0
    jitter: Sequence[Sequence[float]] = ()  # by which each rank learns of the agreement later
    hosts: Sequence[str] = ()
    clocks: dict[str, Clock] = field(default_factory=dict)
    nbytes: int = 4_000_000
    transport: str = "SHM"
    before: float = 0.6  # the share of compute before the first gradient
    first: float = 10_000.0  # when the job begins

    @property
    def size(self) -> int:
        return len(self.compute[0])

    def host(self, rank: int) -> str:
        return self.hosts[rank] if self.hosts else "a"

    def events(self, rank: int) -> list[Event]:
        """The file of a rank."""
        clock = self.clocks.get(self.host(rank), Clock())
        started = clock.read(self.first - 5000)

        def stamp(time: float) -> int:
            return round(clock.read(time) - started)

        about = {
            "start_time_since_epoch_in_micros": clock.epoch + round(started),
            "rank": rank,
            "size": self.size,
            "host": self.host(rank),
            "clock": round(started),
            "version": 2,
        }
        names = {0: None, 1: ROW, 2: "waiting", 3: OPTIMIZER}
        events: list[Event] = []
        for pid, name in names.items():
            row = about if name is None else {"name": name}
            if name == ROW:
                row = {**row, "tensors": ["b", "a"]}
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": row})
        for number, (began, ready, agreed, ended) in enumerate(self.times(rank)):
            ids = {"set": 0, "number": number}
            end = {"dtype": "float32", "count": 2, "bytes": self.nbytes}
            kind = f"{self.transport}_ALLREDUCE"
            events += [
                {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": stamp(ready), "pid": 1},
                {"ph": "E", "ts": stamp(agreed), "pid": 1, "args": ids},
                {"ph": "B", "name": "ALLREDUCE", "ts": stamp(agreed), "pid": 1},
                {"ph": "B", "name": kind, "ts": stamp(agreed), "pid": 1},
                {"ph": "E", "ts": stamp(ended), "pid": 1},
                {"ph": "E", "ts": stamp(ended), "pid": 1, "args": end},
            ]
            for row, name, first, last in (
                (2, "WAIT", ready, ended),
                (3, "STEP", began, ended),
                (3, "BACKWARD", began + self.before * (ready - began), ready),
            ):
                span = {"ph": "X", "name": name, "ts": stamp(first), "pid": row}
                span["dur"] = stamp(last) - stamp(first)
                span["args"] = {"for": ROW} if name == "WAIT" else {"step": number}
                events.append(span)
        return events

    def times(self, rank: int) -> list[tuple[float, float, float, float]]:
        """Of each step: its beginning, when the rank is ready, when all agree, and its end."""
        ends = [self.first] * self.size
        found = []
        for step, compute in enumerate(self.compute):
            ready = [end + each for end, each in zip(ends, compute, strict=True)]
            late = self.jitter[step] if self.jitter else [0.0] * self.size
            agreed = [max(ready) + self.agreeing + each for each in late]
            began = ends
            ends = [each + self.reduction[step] for each in agreed]
            found.append((began[rank], ready[rank], agreed[rank], ends[rank]))
        return found

    def recordings(self) -> list[Recording]:
        return [interpret(self.events(rank)) for rank in range(self.size)]

    def write(self, folder: Path) -> list[str]:
        """The ranks' files, one event in a line."""
        paths = []
        for rank in range(self.size):
            path = folder / ("run.json" if rank == 0 else f"run.rank{rank}.json")
            lines = ",\n".join(json.dumps(event) for event in self.events(rank))
            path.write_text(f"[\n{lines}\n]\n")
            paths.append(str(path))
        return paths


def even(steps: int = 20, ranks: int = 2, **how: Any) -> MadeJob:
    """Nobody is late: 10 ms of compute and 2 ms of reduction in each step."""
    return MadeJob([[10_000.0] * ranks] * steps, [2000.0] * steps, **how)


def with_slow_rank(steps: int = 20, ranks: int = 3, slow: int = 1, **how: Any) -> MadeJob:
    """One rank takes 15 ms instead of 10."""
    times = [15_000.0 if rank == slow else 10_000.0 for rank in range(ranks)]
    return MadeJob([times] * steps, [2000.0] * steps, **how)
