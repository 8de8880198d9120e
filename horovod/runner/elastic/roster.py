"""The driver's book of workers: who lives, who has a place, who is gone and why.

Workers are numbered in the order of starting; their names in the store are "w0", "w1", ...
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from horovod.runner.elastic import policy
from horovod.runner.report import Exit


def name_of(number: int) -> str:
    return f"w{number}"


def number_of(name: str) -> int:
    return int(name[1:])


@dataclass(eq=False)
class Process:
    """A worker, while it lives."""

    number: int
    host: str
    index: int  # which of the host's slots it occupies
    rank: int  # its newest, or for a new one a guess
    pid: int = 0
    joined: int | None = None
    seat: int = 0  # see `policy.WorkerView`
    ready_at: float | None = None
    heard: int = 0  # the newest decision that its process knows
    entered: tuple[int, int] = (0, 0)  # decision and attempt of the generation that it entered last
    done: bool = False  # its training function has returned
    leaving: bool = False
    dismissed: bool = False  # we told it to end: how it ends means nothing
    because_of: tuple[int, ...] | None = None  # see `Exit`
    ranks: dict[int, int] = field(default_factory=dict)  # by decision

    @property
    def name(self) -> str:
        return name_of(self.number)

    def __str__(self) -> str:
        rank = f"rank {self.rank}, " if self.joined is not None else ""
        return f"{self.name} ({rank}{self.host})"

    def exit(self, code: int) -> Exit:
        """With the rank that its own output speaks of: it may not have heard of the newest."""
        rank = self.ranks.get(self.entered[0], self.rank)
        return Exit(rank, self.pid, code, self.host, self.because_of)


@dataclass(frozen=True)
class WorkerFailure:
    """How a worker failed, and which it was."""

    worker: int
    exit: Exit


@dataclass
class Roster:
    """All workers, and what became of those with a place in the newest decision."""

    alive: dict[int, Process] = field(default_factory=dict)
    placed: frozenset[int] = frozenset()  # in the newest decision, dead or alive
    failed: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    ended_early: list[str] = field(default_factory=list)  # hosts of those that never had a place
    failures: list[WorkerFailure] = field(default_factory=list)  # since workers met last
    last_failure: WorkerFailure | None = None
    next_number: int = 0

    def new(self, host: str) -> Process:
        """A process that is about to start."""
        taken = {p.index for p in self.alive.values() if p.host == host}
        index = next(i for i in range(len(taken) + 1) if i not in taken)
        rank = len(self.members()) + sum(p.joined is None for p in self.alive.values())
        process = Process(self.next_number, host, index, rank)
        self.next_number += 1
        self.alive[process.number] = process
        return process

    def get(self, name: str) -> Process | None:
        return self.alive.get(number_of(name))

    def members(self) -> list[Process]:
        """Alive, in the newest decision, and staying."""
        staying = [p for p in self.alive.values() if p.number in self.placed]
        return [p for p in staying if not (p.leaving or p.done or p.dismissed)]

    def newcomers(self) -> list[Process]:
        """Alive and without a place so far."""
        new = [p for p in self.alive.values() if p.joined is None]
        return [p for p in new if not (p.done or p.dismissed)]

    def on(self, host: str) -> list[Process]:
        return [p for p in self.alive.values() if p.host == host]

    def place(
        self, number: int, members: Sequence[policy.WorkerView], ranks: Mapping[int, int]
    ) -> None:
        """The newest decision, this number, has places for these workers."""
        self.placed = frozenset(ranks)
        for worker in members:
            process = self.alive[worker.id]
            process.rank = process.ranks[number] = ranks[worker.id]
            process.joined, process.seat = worker.joined, worker.seat
        self.failed, self.left, self.finished = [], [], []

    def remove(self, process: Process) -> None:
        """The process is gone."""
        self.alive.pop(process.number, None)
        if process.joined is None:
            self.ended_early.append(process.host)

    def fail(self, process: Process, code: int) -> WorkerFailure:
        """The process is gone, by a failure."""
        failure = WorkerFailure(process.number, process.exit(code))
        self.remove(process)
        self.failures.append(failure)
        own = [each for each in self.failures if each.exit.because_of is None]
        self.last_failure = (own or self.failures)[-1]
        if process.number in self.placed:
            self.failed.append(process.number)
        return failure

    def view(self) -> list[policy.WorkerView]:
        """The living, as the policy sees them."""
        found = [*self.members(), *self.newcomers()]
        return [
            policy.WorkerView(
                p.number, p.host, p.joined, p.seat, p.number in self.placed, p.ready_at
            )
            for p in found
        ]

    def behind(self, number: int) -> list[Process]:
        """Those who should know decision `number` by now but do not, so probably hang."""
        told = [p for p in self.alive.values() if p.joined is not None]
        ending = [p for p in told if p.done or p.leaving or p.dismissed]
        return [p for p in told if p not in ending and max(p.heard, p.entered[0]) < number]

    def absent(self, number: int, attempt: int) -> list[Process]:
        """Members who have not come to that generation."""
        return [p for p in self.members() if p.entered < (number, attempt)]


def now() -> float:
    return time.monotonic()


def names(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(name_of(number) for number in numbers)


def all_by_exit_code(failures: Sequence[WorkerFailure]) -> bool:
    """Whether all ended by themselves, not by a signal or with their host."""
    return all(failure.exit.code > 0 for failure in failures)
