"""What the driver of an elastic job knows, all in one place: workers, decisions, what went wrong.

`driver`, `liveness` and `failures` note here what happens, `decision_log` what was decided; `view`
is what the policy sees of it. Workers are numbered in the order of starting; their names in the
store are "w0", "w1", ...
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from horovod.common.decisions import Decision
from horovod.runner.elastic.discovery import DiscoveredHosts
from horovod.runner.elastic.status import count
from horovod.runner.elastic.termination import Ending
from horovod.runner.elastic.view import View, WorkerFailure, WorkerView
from horovod.runner.output.progress import some
from horovod.runner.output.report import Exit, Outcome


def name_of(number: int) -> str:
    return f"w{number}"


def number_of(name: str) -> int:
    return int(name[1:])


def names(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(name_of(number) for number in numbers)


def now() -> float:
    return time.monotonic()


@dataclass(eq=False)
class Process:
    """A worker, while it lives."""

    number: int
    host: str
    index: int  # which of the host's slots it occupies
    rank: int  # its newest, or for a new one a guess
    pid: int = 0
    joined: int | None = None
    seat: int = 0  # see `WorkerView`
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

    # Decisions.
    newest: Decision = field(default_factory=lambda: Decision(0, {}, "", "start"))
    formed: bool = False  # its workers have met
    formed_before: bool = False  # workers have met at least once
    forming_since: float = 0.0  # when the first decision since they met was made
    causes: list[str] = field(default_factory=list)  # of the next one, for people
    asked: bool = False  # workers cannot go on without a new one

    # Hosts.
    discovered: bool = False  # it is known which there are
    no_hosts: str = ""  # why none will come any more
    host_problem: str = ""  # the last that was said about one
    fenced_until: float = 0.0  # workers that we cannot kill may live until then
    short_since: float | None = None  # since when there are too few workers
    shortage: str = ""  # what people were told about that

    # What went wrong.
    failures: list[WorkerFailure] = field(default_factory=list)  # since workers met last
    last_failure: WorkerFailure | None = None
    met: bool = False  # workers have met since all were lost
    fruitless: int = 0  # times in a row that all were lost before they had met

    # The end.
    finishing: bool = False  # somebody has finished
    ended_well: dict[int, Exit] = field(default_factory=dict)  # by rank
    unrecovered: WorkerFailure | None = None  # since then nobody has ended well
    bad_end: WorkerFailure | None = None  # of a worker that had finished training

    # -- questions -------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of the newest decision; 0 before the first."""
        return self.newest.number

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

    def behind(self, number: int) -> list[Process]:
        """Those who should know decision `number` by now but do not, so probably hang."""
        told = [p for p in self.alive.values() if p.joined is not None]
        ending = [p for p in told if p.done or p.leaving or p.dismissed]
        return [p for p in told if p not in ending and max(p.heard, p.entered[0]) < number]

    def absent(self, number: int, attempt: int = 0) -> list[Process]:
        """Members who have not come to that generation."""
        return [p for p in self.members() if p.entered < (number, attempt)]

    def view(
        self,
        now: float,
        hosts: DiscoveredHosts,
        *,
        for_good: frozenset[str] = frozenset(),
        resting: frozenset[str] = frozenset(),
        connecting: bool = False,
        interrupted: bool = False,
    ) -> View:
        """What the policy sees."""
        return View(
            now=now,
            number=self.number,
            formed=self.formed,
            too_few=self.newest.too_few,
            asked=self.asked,
            failed=tuple(self.failed),
            left=tuple(self.left),
            finished=tuple(self.finished),
            hosts=hosts.host_slots,
            discovered=self.discovered,
            no_hosts=self.no_hosts,
            blacklisted=hosts.blacklisted,
            for_good=for_good,
            resting=resting,
            connecting=connecting,
            workers=self.workers(),
            running=any(not process.dismissed for process in self.alive.values()),
            fenced_until=self.fenced_until,
            short_since=self.short_since,
            failures=tuple(self.failures),
            last_failure=self.last_failure,
            host_problem=self.host_problem,
            met=self.met,
            fruitless=self.fruitless,
            finishing=self.finishing,
            interrupted=interrupted,
            ended_early=tuple(self.ended_early),
            anybody_finished=bool(self.ended_well or self.bad_end),
            unforgiven=self.bad_end or self.unrecovered,
        )

    def workers(self) -> list[WorkerView]:
        """The living, as the policy sees them."""
        found = [*self.members(), *self.newcomers()]
        return [
            WorkerView(p.number, p.host, p.joined, p.seat, p.number in self.placed, p.ready_at)
            for p in found
        ]

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
        self.newest, self.formed, self.asked = decision, False, False
        self.causes = []
        self.forming_since = self.forming_since or now()

    def place(self, members: Sequence[WorkerView], ranks: Mapping[int, int]) -> None:
        """The newest decision has places for these workers."""
        self.placed = frozenset(ranks)
        for worker in members:
            process = self.alive[worker.id]
            process.rank = process.ranks[self.number] = ranks[worker.id]
            process.joined, process.seat = worker.joined, worker.seat
        self.failed, self.left, self.finished = [], [], []

    def entered(self, process: Process, number: int, attempt: int) -> None:
        """A worker has come to meet the others; again, if there is an attempt before."""
        process.entered = max(process.entered, (number, attempt))
        if attempt and number == self.number:
            self.forming_since = self.forming_since or now()

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

    def outcome(self, ending: Ending) -> Outcome:
        """What became of the job."""
        outcome = Outcome(problem=ending.problem, problem_status=ending.status)
        if ending.failure is not None:
            first = outcome.first_failure = ending.failure.exit
            outcome.exits = [failure.exit for failure in self.failures]
            early = [self.ended_well.get(rank) for rank in first.because_of or ()]
            outcome.gone_early = [exit for exit in early if exit is not None]
        return outcome
