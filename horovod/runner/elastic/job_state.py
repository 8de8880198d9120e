"""What the driver of an elastic job knows, all in one place: workers, decisions, what went wrong.

`driver`, `liveness` and `failures` note here what happens, `decision_log` what was decided;
`policy` and `termination` decide by it, by the user's `Limits`, and by nothing else. Workers are
numbered in the order of starting; their names in the store are "w0", "w1", ...
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from horovod.common.decisions import Decision
from horovod.runner.elastic.status import count
from horovod.runner.output.progress import some
from horovod.runner.output.report import Exit


def name_of(number: int) -> str:
    return f"w{number}"


def number_of(name: str) -> int:
    return int(name[1:])


def names(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(name_of(number) for number in numbers)


@dataclass(frozen=True)
class Limits:
    """What the user asked for."""

    num_proc: int  # slots without which the job does not begin
    min_np: int
    max_np: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600.0
    start_timeout: float = 30.0
    answer_timeout: float = 30.0  # for processes to notice a decision


@dataclass(eq=False)
class Process:
    """A worker, while it lives."""

    number: int
    host: str
    index: int = 0  # which of the host's slots it occupies; fixed once it has joined
    rank: int = 0  # its newest, or for a new one a guess
    pid: int = 0
    joined: int | None = None  # the first decision that had a place for it
    seat: int = 0  # its order among those who joined with it
    ready_at: float | None = None  # since when it waits for its first place
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

    @property
    def age(self) -> tuple[int, int]:
        """Oldest first: who joined earlier has the state of who joined later."""
        return (1 << 62, self.number) if self.joined is None else (self.joined, self.seat)

    @property
    def ending(self) -> bool:
        return self.done or self.leaving or self.dismissed

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
class JobState:
    """The facts of one job."""

    # Workers, and what became of those with a place in the newest decision.
    alive: dict[int, Process] = field(default_factory=dict)
    placed: frozenset[int] = frozenset()  # in the newest decision, dead or alive
    failed: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    ended_early: list[str] = field(default_factory=list)  # hosts of those that never had a place
    next_number: int = 0

    # The newest decision.
    number: int = 0  # 0 before the first
    too_few: bool = False  # its workers wait for others
    formed: bool = False  # its workers have met
    formed_before: bool = False  # workers have met at least once
    forming_since: float = 0.0  # when the first decision since they met was made
    causes: list[str] = field(default_factory=list)  # of the next one, for people
    asked: bool = False  # workers cannot go on without a new one

    # Hosts, as the driver saw them at the time `now`.
    now: float = 0.0
    hosts: Mapping[str, int] = field(default_factory=dict)  # offered, oldest first
    blacklisted: frozenset[str] = frozenset()
    for_good: frozenset[str] = frozenset()  # blacklisted, and never to be used again
    resting: frozenset[str] = frozenset()  # hosts on which nothing can be started at the moment
    connecting: bool = False  # some of them soon
    discovered: bool = False  # it is known which there are
    no_hosts: str = ""  # why none will come any more
    host_problem: str = ""  # the last that was said about one
    obstacle: str = ""  # why the cluster does not start workers that it was asked for
    fenced_until: float = 0.0  # workers that we cannot kill may live until then
    short_since: float | None = None  # since when there are too few workers
    shortage: str = ""  # what people were told about that

    # What went wrong.
    failures: list[WorkerFailure] = field(default_factory=list)  # since workers met last
    last_failure: WorkerFailure | None = None
    met: bool = False  # workers have met since all were lost
    fruitless: int = 0  # times in a row that all were lost before they had met

    # The end.
    finishing: bool = False  # somebody has finished: shrink only
    interrupted: bool = False  # the launcher was told to end: the same
    ended_well: dict[int, Exit] = field(default_factory=dict)  # by rank
    unrecovered: WorkerFailure | None = None  # since then nobody has ended well
    bad_end: WorkerFailure | None = None  # of a worker that had finished training

    # -- questions -------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """The end is near: nobody is added or replaced."""
        return self.finishing or self.interrupted

    @property
    def usable(self) -> dict[str, int]:
        """Hosts for new workers."""
        return {host: n for host, n in self.hosts.items() if host not in self.blacklisted}

    @property
    def slots(self) -> int:
        return sum(self.usable.values())

    @property
    def workers(self) -> list[Process]:
        """Those that are, or may become, a part of the job."""
        return [*self.members(), *self.newcomers()]

    def members(self) -> list[Process]:
        """Alive, in the newest decision, and staying."""
        return [p for p in self.alive.values() if p.number in self.placed and not p.ending]

    def newcomers(self) -> list[Process]:
        """Alive and without a place so far."""
        new = [p for p in self.alive.values() if p.joined is None]
        return [p for p in new if not (p.done or p.dismissed)]

    def on(self, host: str) -> list[Process]:
        return [p for p in self.alive.values() if p.host == host]

    def behind(self, number: int) -> list[Process]:
        """Those who should know decision `number` by now but do not, so probably hang."""
        told = [p for p in self.alive.values() if p.joined is not None and not p.ending]
        return [p for p in told if max(p.heard, p.entered[0]) < number]

    def absent(self, number: int, attempt: int = 0) -> list[Process]:
        """Members who have not come to that generation."""
        return [p for p in self.members() if p.entered < (number, attempt)]

    def awaited(self, connecting: Sequence[str]) -> str:
        """Who or what is awaited, for people; empty while the workers train."""
        if self.shortage or self.finishing or self.formed:
            return "" if self.finishing else self.shortage
        if self.number == 0:
            starting = [str(p) for p in self.alive.values() if p.ready_at is None]
            who = connecting or starting
            return f"starting, waiting for {some(who)}" if who else ""
        who = [str(p) for p in self.absent(self.number)]
        ranks = count(len(self.members()), "rank")
        again = "re-" * self.formed_before
        return f"{again}forming with {ranks}, waiting for {some(who)}" if who else ""

    # -- what happens ----------------------------------------------------------------------

    def new(self, host: str) -> Process:
        """A process that is about to start."""
        taken = {p.index for p in self.on(host)}
        index = next(i for i in range(len(taken) + 1) if i not in taken)
        rank = len(self.members()) + sum(p.joined is None for p in self.alive.values())
        process = Process(self.next_number, host, index, rank)
        self.next_number += 1
        self.alive[process.number] = process
        return process

    def decided(self, decision: Decision) -> None:
        """There is a newest decision."""
        self.number, self.too_few = decision.number, decision.too_few
        self.formed, self.asked, self.causes = False, False, []
        self.forming_since = self.forming_since or time.monotonic()

    def place(self, members: Sequence[Process], ranks: Mapping[int, int]) -> None:
        """The newest decision has places for these workers."""
        self.placed = frozenset(ranks)
        for worker in members:
            process = self.alive[worker.number]
            process.rank = process.ranks[self.number] = ranks[worker.number]
            process.joined, process.seat = worker.joined, worker.seat
            self._move(process, worker.index)
        self.failed, self.left, self.finished = [], [], []

    def _move(self, process: Process, index: int) -> None:
        """Put a worker into a slot of its host.

        A process that is there gets the worker's slot in exchange. It is one that has no place yet,
        or none any more: the policy gives away no member's slot.
        """
        if process.index == index:
            return
        for other in self.on(process.host):
            if other.index == index:
                other.index = process.index
        process.index = index

    def entered(self, process: Process, number: int, attempt: int) -> None:
        """A worker has come to meet the others; again, if there is an attempt before."""
        process.entered = max(process.entered, (number, attempt))
        if attempt and number == self.number:
            self.forming_since = self.forming_since or time.monotonic()

    def mark_formed(self) -> None:
        """The workers of the newest decision have met."""
        self.formed = self.formed_before = self.met = True
        self.forming_since, self.fruitless = 0.0, 0
        self.failures.clear()

    def remove(self, process: Process) -> None:
        """The process is gone."""
        self.alive.pop(process.number, None)
        if process.joined is None:
            self.ended_early.append(process.host)

    def end_well(self, process: Process) -> None:
        """The process is gone, and has finished."""
        self.remove(process)
        exit = process.exit(0)
        self.ended_well[exit.rank] = exit
        self.unrecovered = None

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

    def lose(self, process: Process, code: int, how: str) -> None:
        """A process that had started is gone, by a failure: others may have to go on without it."""
        failure = self.fail(process, code)
        if process.done:
            self.bad_end = self.bad_end or failure
        elif process.because_of is None or self.unrecovered is None:
            self.unrecovered = failure
        self.causes.append(f"{process} failed: {how}")

    def begin_anew(self) -> None:
        """All were lost: others begin from nothing."""
        self.fruitless += not self.met
        self.met = False
        self.failures.clear()
