"""What the policy of an elastic job knows: the user's limits, and the job at one moment.

`job_state` makes a `View` whenever something has happened; `policy` and `termination` decide by it,
and by nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from horovod.runner.output.report import Exit


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


@dataclass(frozen=True)
class WorkerView:
    """A process of the job that is alive."""

    id: int  # in the order of starting
    host: str
    joined: int | None = None  # the first decision that had a place for it
    seat: int = 0  # its order among those who joined with it
    placed: bool = False  # it has one in the newest
    ready_at: float | None = None  # since when it waits for its first place

    @property
    def age(self) -> tuple[int, int]:
        """Oldest first: who joined earlier has the state of who joined later."""
        return (1 << 62, self.id) if self.joined is None else (self.joined, self.seat)


@dataclass(frozen=True)
class WorkerFailure:
    """How a worker failed, and which it was."""

    worker: int
    exit: Exit


@dataclass(frozen=True)
class View:
    """All that matters for the next step."""

    now: float

    # The newest decision.
    number: int = 0  # 0 before the first
    formed: bool = False  # its workers have met
    too_few: bool = False  # they wait for others
    asked: bool = False  # they cannot go on without a new one
    failed: tuple[int, ...] = ()  # had a place in it and died
    left: tuple[int, ...] = ()  # gave it back
    finished: tuple[int, ...] = ()  # have ended well

    # Hosts, and the living.
    hosts: Mapping[str, int] = field(default_factory=dict)  # offered, oldest first
    discovered: bool = True  # once it is known which there are
    no_hosts: str = ""  # why none will come any more
    blacklisted: frozenset[str] = frozenset()
    for_good: frozenset[str] = frozenset()  # blacklisted, and never to be used again
    resting: frozenset[str] = frozenset()  # hosts on which nothing can be started at the moment
    connecting: bool = False  # some of them soon
    workers: Sequence[WorkerView] = ()
    running: bool = True  # somebody lives whom we did not tell to end
    fenced_until: float = 0.0  # workers on lost hosts may live until then
    short_since: float | None = None  # since when there are too few

    # What went wrong.
    failures: tuple[WorkerFailure, ...] = ()  # since workers met last
    last_failure: WorkerFailure | None = None
    host_problem: str = ""  # the last that was said about a host
    met: bool = False  # workers have met since all were lost
    fruitless: int = 0  # times in a row that all were lost before they had met

    # The end.
    finishing: bool = False  # somebody has finished: shrink only
    interrupted: bool = False  # the launcher was told to end: the same
    ended_early: tuple[str, ...] = ()  # hosts of those who ended without ever having a place
    anybody_finished: bool = False
    unforgiven: WorkerFailure | None = None  # since which nobody has finished

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
