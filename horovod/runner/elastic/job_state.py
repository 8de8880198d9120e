"""Everything that the driver of an elastic job knows: workers, decisions, hosts, failures.

`driver`, `mailbox` and `liveness` note events and decisions here.
`policy` and `termination` decide by this state and the user's `Limits`, and by nothing else.
Workers are numbered in the order in which they are started; their names in the store are "w0",
"w1", ...
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from horovod.common.generations.decisions import Decision
from horovod.observe.reports.amounts import count_of
from horovod.runner.output.progress import list_some
from horovod.runner.output.report import Exit


def name_of(number: int) -> str:
    """Return the name of a worker in the store."""
    return f"w{number}"


def number_of(name: str) -> int:
    """Return the number of a worker that has this name."""
    return int(name[1:])


def names(numbers: Iterable[int]) -> tuple[str, ...]:
    """Return the names of several workers."""
    return tuple(name_of(number) for number in numbers)


@dataclass(frozen=True)
class Limits:
    """The user's limits for the size of an elastic job, and for the times that it waits."""

    num_proc: int  # slots that the job needs to begin
    min_np: int
    max_np: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600.0
    start_timeout: float = 30.0
    answer_timeout: float = 30.0  # seconds for processes to notice a decision


@dataclass(eq=False)
class Process:
    """A worker, while it lives."""

    number: int
    host: str
    index: int = 0  # the slot of the host that it occupies; fixed once it has joined
    rank: int = 0  # its newest rank, or a guess for a new worker
    pid: int = 0
    joined: int | None = None  # the first decision that it is a part of
    seat: int = 0  # its position among the workers that joined with it
    ready_at: float | None = None  # when it began to wait for its first decision
    heard: int = 0  # the newest decision that its process knows
    entered: tuple[int, int] = (0, 0)  # decision and attempt of the last generation that it entered
    has_met: bool = False  # its first generation has formed, and it chooses a device by its slot
    has_state: bool = False  # whether it has received the state of the others, or begun with it
    is_done: bool = False  # its training function has returned
    is_leaving: bool = False
    is_dismissed: bool = False  # we told it to end, so its exit code means nothing
    because_of: tuple[int, ...] | None = None  # see `Exit`
    ranks: dict[int, int] = field(default_factory=dict)  # by decision

    @property
    def name(self) -> str:
        return name_of(self.number)

    @property
    def age(self) -> tuple[int, int]:
        """A sort key, oldest first: a worker has the state of all that joined after it."""
        return (1 << 62, self.number) if self.joined is None else (self.joined, self.seat)

    @property
    def is_ending(self) -> bool:
        return self.is_done or self.is_leaving or self.is_dismissed

    def __str__(self) -> str:
        rank = f"rank {self.rank}, " if self.joined is not None else ""
        return f"{self.name} ({rank}{self.host})"

    def exit(self, code: int) -> Exit:
        """Return its exit, with the rank that its own output shows.

        That is the rank of the generation that it entered: it may not know the newest decision.
        """
        rank = self.ranks.get(self.entered[0], self.rank)
        return Exit(rank, self.pid, code, self.host, self.because_of, worker=self.number)


@dataclass
class JobState:
    """The facts of one job."""

    # Workers. "Placed" are those in the newest decision; the next three lists have some of these.
    alive: dict[int, Process] = field(default_factory=dict)
    placed_workers: frozenset[int] = frozenset()  # in the newest decision, dead or alive
    failed_workers: list[int] = field(default_factory=list)
    departed_workers: list[int] = field(default_factory=list)
    finished_workers: list[int] = field(default_factory=list)
    ended_early: list[str] = field(default_factory=list)  # hosts of workers that no decision had
    next_number: int = 0

    # The newest decision.
    number: int = 0  # 0 before the first
    too_few: bool = False  # its workers wait for others
    is_formed: bool = False  # its workers have formed a generation
    last_formed: int = 0  # the newest decision whose workers have formed a generation
    forming_since: float = 0.0  # when the first decision after the last formed one was made
    causes: list[str] = field(default_factory=list)  # of the next decision, for people
    decision_requested: bool = False  # workers cannot go on without a new decision

    # Hosts, as the driver saw them at the time `now`.
    now: float = 0.0
    hosts: Mapping[str, int] = field(default_factory=dict)  # offered, oldest first
    blacklisted: frozenset[str] = frozenset()
    excluded_hosts: frozenset[str] = frozenset()  # blacklisted, and never to be used again
    resting_hosts: frozenset[str] = (
        frozenset()
    )  # hosts on which nothing can be started at the moment
    hosts_connecting: bool = False  # some of them soon
    hosts_known: bool = False  # discovery has answered
    no_hosts: str = ""  # why no hosts will come any more
    host_problem: str = ""  # the last problem of a host
    obstacle: str = ""  # why the cluster does not start workers that it was asked for
    fenced_until: float = 0.0  # workers that we cannot kill may live until then
    short_since: float | None = None  # since when there are too few workers
    shortage: str = ""  # the message to people about that

    # What went wrong.
    failures: list[Exit] = field(default_factory=list)  # since a generation formed
    last_failure: Exit | None = None
    have_met: bool = False  # a generation has formed since all workers were lost
    fruitless_starts: int = 0  # times in a row that all workers were lost before that

    # The end.
    finishing: bool = False  # a worker has finished: the job only shrinks from now on
    interrupted: bool = False  # the launcher was told to end: the job only shrinks, too
    ended_well: dict[int, Exit] = field(default_factory=dict)  # by rank
    unrecovered: Exit | None = None  # a failure after which no worker has ended well
    bad_end: Exit | None = None  # the failure of a worker that had finished training

    # -- questions -------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the job comes to its end, so that no worker is added or replaced."""
        return self.finishing or self.interrupted

    @property
    def usable(self) -> dict[str, int]:
        """The hosts for new workers, with their slots."""
        return {host: n for host, n in self.hosts.items() if host not in self.blacklisted}

    @property
    def slots(self) -> int:
        return sum(self.usable.values())

    @property
    def workers(self) -> list[Process]:
        """The workers that are, or may become, a part of the job."""
        return [*self.members(), *self.newcomers()]

    def members(self) -> list[Process]:
        """Return the workers of the newest decision that are alive and stay.

        If none of them has the state, those count too that it has left out, have it and still live.
        """
        alive, in_decision = self.alive.values(), self.placed_workers
        placed = [p for p in alive if p.number in in_decision and not p.is_ending]
        if self.is_over or any(p.has_state for p in placed):
            return placed
        return [p for p in alive if (p.has_state or p.number in in_decision) and not p.is_ending]

    def newcomers(self) -> list[Process]:
        """Return the workers that are alive and not in any decision so far."""
        new = [p for p in self.alive.values() if p.joined is None]
        return [p for p in new if not (p.is_done or p.is_dismissed)]

    def workers_on(self, host: str) -> list[Process]:
        """Return the workers that are alive on a host."""
        return [p for p in self.alive.values() if p.host == host]

    def keeps_slot(self, process: Process) -> bool:
        """Return whether a worker may have chosen a device by its slot, after it met others."""
        if process.has_met or process.joined is None:
            return process.has_met
        return self.is_formed or process.joined <= self.last_formed

    def unresponsive_workers(self, number: int) -> list[Process]:
        """Return the workers that do not know decision `number` yet; they soon count as lost.

        A worker that joined by a later decision need not know this one.
        """
        joined = [p for p in self.alive.values() if p.joined is not None and p.joined <= number]
        told = [p for p in joined if not p.is_ending]
        return [p for p in told if max(p.heard, p.entered[0]) < number]

    def unaware_workers(self) -> list[Process]:
        """Return workers that a decision added and the newest left out before they entered any.

        They may never have learned that they had a slot, and would wait for one for ever. A worker
        that knows that it was left out ends by itself.
        """
        removed = [p for p in self.alive.values() if p.number not in self.placed_workers]
        return [p for p in removed if p.joined and p.entered == (0, 0) and not p.is_ending]

    def absent_members(self, number: int, attempt: int = 0) -> list[Process]:
        """Return the members that have not entered generation `number`, in this attempt."""
        return [p for p in self.members() if p.entered < (number, attempt)]

    def describe_awaited(self, connecting: Sequence[str]) -> str:
        """Return a line for people about what the job waits for; empty while the workers train."""
        if self.shortage or self.finishing or self.is_formed:
            return "" if self.finishing else self.shortage
        if self.number == 0:
            starting = [str(p) for p in self.alive.values() if p.ready_at is None]
            who = connecting or starting
            return f"starting, waiting for {list_some(who)}" if who else ""
        who = [str(p) for p in self.absent_members(self.number)]
        ranks = count_of(len(self.members()), "rank")
        again = "re-" * bool(self.last_formed)
        return f"{again}forming with {ranks}, waiting for {list_some(who)}" if who else ""

    # -- what happens ----------------------------------------------------------------------

    def add_process(self, host: str) -> Process:
        """Add a process that is about to start, in the lowest free slot of its host."""
        taken = {p.index for p in self.workers_on(host)}
        index = next(i for i in range(len(taken) + 1) if i not in taken)
        rank = len(self.members()) + sum(p.joined is None for p in self.alive.values())
        process = Process(self.next_number, host, index, rank)
        self.next_number += 1
        self.alive[process.number] = process
        return process

    def note_decision(self, decision: Decision) -> None:
        """Note a new decision."""
        self.number, self.too_few = decision.number, decision.too_few
        self.is_formed, self.decision_requested, self.causes = False, False, []
        self.forming_since = self.forming_since or time.monotonic()

    def assign_ranks(self, members: Sequence[Process], ranks: Mapping[int, int]) -> None:
        """Note the workers of the newest decision, and their ranks."""
        self.placed_workers = frozenset(ranks)
        for worker in members:
            process = self.alive[worker.number]
            process.rank = process.ranks[self.number] = ranks[worker.number]
            process.joined, process.seat = worker.joined, worker.seat
            self._move(process, worker.index)
        self.failed_workers, self.departed_workers, self.finished_workers = [], [], []

    def _move(self, process: Process, index: int) -> None:
        """Put a worker into a slot of its host.

        A process that is in that slot gets the worker's slot in exchange. Such a process is not in
        the newest decision: the policy never gives away a member's slot. If it has chosen a device
        by its slot, it keeps it all the same, and has it again should it come back (`members`).
        """
        if process.index == index:
            return
        for other in self.workers_on(process.host):
            if other.index == index and not other.has_met:
                other.index = process.index
        process.index = index

    def note_entry(self, process: Process, number: int, attempt: int) -> None:
        """Note that a worker has entered a generation; an attempt above 0 forms it again."""
        process.entered = max(process.entered, (number, attempt))
        if attempt and number == self.number:
            self.forming_since = self.forming_since or time.monotonic()

    def mark_formed(self, number: int) -> None:
        """Note that the workers of a decision have formed a generation.

        If a newer decision was made meanwhile, they have met all the same.
        """
        self.have_met, self.fruitless_starts = True, 0
        self.last_formed = max(self.last_formed, number)
        if number == self.number:
            self.is_formed, self.forming_since = True, 0.0
            self.failures.clear()

    def remove(self, process: Process) -> None:
        """Remove a process that is gone."""
        self.alive.pop(process.number, None)
        if process.joined is None:
            self.ended_early.append(process.host)

    def note_success(self, process: Process) -> None:
        """Note a process that is gone and has finished."""
        self.remove(process)
        exit = process.exit(0)
        self.ended_well[exit.rank] = exit
        self.unrecovered = None

    def note_failure(self, process: Process, code: int, how: str = "") -> Exit:
        """Note a process that is gone because of a failure, which `how` describes to people."""
        failure = process.exit(code)
        if how and how != failure.describe():
            failure = dataclasses.replace(failure, loss=how)
        self.remove(process)
        self.failures.append(failure)
        own = [each for each in self.failures if each.because_of is None]
        self.last_failure = (own or self.failures)[-1]
        # Until the newest generation has formed, the others may still be in an older one and wait
        # for a worker that the newest decision has left out.
        if process.number in self.placed_workers or (process.joined and not self.is_formed):
            self.failed_workers.append(process.number)
        return failure

    def note_loss(self, process: Process, code: int, how: str) -> None:
        """Note the failure of a process that had started; it is a cause of the next decision."""
        failure = self.note_failure(process, code, how)
        if process.is_done:
            self.bad_end = self.bad_end or failure
        elif process.because_of is None or self.unrecovered is None:
            self.unrecovered = failure
        self.causes.append(f"{process} failed: {how}")

    def begin_anew(self) -> None:
        """Note that all workers were lost, and that others begin without their state."""
        self.fruitless_starts += not self.have_met
        self.have_met = False
        self.failures.clear()
