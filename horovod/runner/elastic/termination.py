"""When an elastic job is over, and what is said about it.

`driver` asks `Termination.find` after everything that happens. A job ends well when its workers
have finished. It ends badly when going on is of no use (all workers fail by themselves, or before
they could begin), not allowed (the reset limit), or not possible (every host is blacklisted, or too
few workers for longer than the elastic timeout).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from horovod.runner.elastic.discovery import HostManager
from horovod.runner.elastic.policy import Limits, View
from horovod.runner.elastic.roster import Roster, WorkerFailure, all_by_exit_code
from horovod.runner.elastic.status import count
from horovod.runner.report import Exit, Outcome, first_to_fail

RESET_LIMIT_EXCEEDED_MESSAGE = (
    "the number of resets during elastic job exceeded limit: {} (--reset-limit)"
)
_MOST_FRUITLESS = 2
"""Times in a row that all workers may be lost before they have met."""


@dataclass(frozen=True)
class Ending:
    """Why the job is over; with neither problem nor failure it has succeeded."""

    problem: str = ""
    failure: WorkerFailure | None = None
    status: int = 1


class Termination:
    """What is needed to see the end coming."""

    def __init__(self, limits: Limits, roster: Roster, manager: HostManager) -> None:
        self.outcome = Outcome()
        self.blamed: WorkerFailure | None = None
        self.discovered = False  # hosts are known
        self.host_problem = ""  # the last that was said about a host
        self._limits = limits
        self._roster = roster
        self._manager = manager
        self._finished: dict[int, Exit] = {}  # who has ended well, by rank
        self._unrecovered: WorkerFailure | None = None  # since then nobody has finished
        self._bad_end: WorkerFailure | None = None  # of a worker that had finished training
        self._fruitless = 0
        self._met = False  # workers have met since all were lost
        self._short_since: float | None = None
        self._told = ""

    # -- what happens ----------------------------------------------------------------------

    def formed(self) -> None:
        """The workers of the newest decision have met."""
        self._fruitless, self._met = 0, True
        self._roster.failures.clear()

    def finished(self, exit: Exit) -> None:
        """A worker has ended well."""
        self._finished[exit.rank] = exit
        self._unrecovered = None

    def failed(self, failure: WorkerFailure, after_done: bool) -> None:
        if after_done:
            self._bad_end = self._bad_end or failure
        elif failure.exit.because_of is None or self._unrecovered is None:
            self._unrecovered = failure

    # -- whether it is over ----------------------------------------------------------------

    def find(self, view: View) -> Ending | None:
        """The end, if this is it."""
        anybody_left = any(not process.dismissed for process in self._roster.alive.values())
        if not anybody_left and (self._finished or self._bad_end):
            return Ending(failure=self._bad_end or self._unrecovered)
        if view.finishing:
            return None
        return self._all_failed(view) or self._nowhere_to_go(view) or self._too_short(view)

    def exhausted(self) -> Ending:
        """A decision is needed that the reset limit forbids."""
        message = RESET_LIMIT_EXCEEDED_MESSAGE.format(self._limits.reset_limit)
        return Ending(message, self._roster.last_failure)

    def settle(self, ending: Ending) -> None:
        """Put it into the outcome."""
        outcome = self.outcome
        outcome.problem, outcome.problem_status = ending.problem, ending.status
        self.blamed = ending.failure
        if ending.failure is not None:
            first = outcome.first_failure = ending.failure.exit
            outcome.exits = [failure.exit for failure in self._roster.failures]
            early = [self._finished.get(rank) for rank in first.because_of or ()]
            outcome.gone_early = [exit for exit in early if exit is not None]

    def _all_failed(self, view: View) -> Ending | None:
        failures = self._roster.failures
        survivors = [w for w in view.workers if w.placed or view.number == 0]
        if survivors or not failures:
            return None
        first = first_to_fail([failure.exit for failure in failures])
        assert first is not None, "all of them failed"
        blamed = next(failure for failure in failures if failure.exit is first)
        if all(failure.exit.pid == 0 for failure in failures):
            return Ending(self.host_problem, status=first.status)  # none could be started
        if all_by_exit_code(failures):
            return Ending(failure=blamed)
        if not self._met:
            self._fruitless += 1
        self._met = False
        if self._fruitless >= _MOST_FRUITLESS:
            return Ending("all workers were lost again before they could begin", blamed)
        failures.clear()
        return None

    def _nowhere_to_go(self, view: View) -> Ending | None:
        short = len(view.workers) < self._limits.min_np
        if not short or not view.hosts:
            return None
        if all(self._manager.blacklisting.is_for_good(host) for host in view.hosts):
            return Ending(
                f"every host has failed too often (--max-worker-failures), and "
                f"{self._have(view)}; the last: {self._last(view)}",
                self._roster.last_failure,
            )
        if view.number and not view.workers and not view.slots and not self._roster.failures:
            return Ending(
                "all workers have left, as they were told to", status=128 + signal.SIGTERM
            )
        return None

    def _last(self, view: View) -> str:
        failure = self._roster.last_failure
        if failure is None:
            return self.host_problem
        return f"rank {failure.exit.rank} on {failure.exit.host}, {failure.exit.describe()}"

    def _too_short(self, view: View) -> Ending | None:
        placed = [worker for worker in view.workers if worker.placed]
        anybody_waits = not view.workers or any(w.ready_at is not None for w in view.workers)
        enough = len(placed) >= self._limits.min_np if view.number else not anybody_waits
        if enough:
            self._short_since = None
            return None
        if self._short_since is None:
            self._short_since = view.now
        seconds = self._limits.elastic_timeout
        if view.now - self._short_since < seconds:
            return None
        return Ending(
            f"gave up after {seconds:g} s (--elastic-timeout): {self._lack(view)}",
            self._roster.last_failure,
        )

    # -- words -----------------------------------------------------------------------------

    @property
    def lacking(self) -> str:
        """What the job waits for because hosts are missing; empty if none are."""
        return self._told

    def waiting_for(self, view: View) -> str:
        """What the job waits for, when that is news."""
        news = ""
        potential = max(view.slots, len(view.workers))
        if self.discovered and not view.finishing and self._short_since is not None:
            wanted = self._limits.min_np if view.number else self._limits.num_proc
            if potential < wanted and (view.number or not view.workers):
                seconds = self._limits.elastic_timeout
                news = f"waiting up to {seconds:g} s for hosts: {self._lack(view)}"
        told, self._told = self._told, news
        return news if news != told else ""

    def _lack(self, view: View) -> str:
        offers = [f"{host}:{slots}" for host, slots in view.usable.items()]
        excluded = sorted(view.blacklisted)
        hosts = ", ".join(offers) or "no host"
        if excluded:
            hosts += f"; not used after failures: {', '.join(excluded)}"
        if view.number == 0 and not view.workers:
            return (
                f"the job needs {count(self._limits.num_proc, 'slot')} to begin, and "
                f"{view.slots} {'is' if view.slots == 1 else 'are'} offered ({hosts})"
            )
        return f"the job needs {self._limits.min_np} workers, and {self._have(view)} ({hosts})"

    def _have(self, view: View) -> str:
        placed = sum(worker.placed for worker in view.workers)
        ready = sum(w.ready_at is not None for w in view.workers if not w.placed)
        starting = len(view.workers) - placed - ready
        extra = [f"{ready} ready"] * bool(ready) + [f"{starting} starting"] * bool(starting)
        verb = "is" if placed == 1 else "are"
        return f"{placed} {verb} left" + (f" ({', '.join(extra)})" if extra else "")
