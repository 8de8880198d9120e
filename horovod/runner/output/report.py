"""The outcome of a job: its exit status, and the account of the first failure.

Jobs fill in an `Outcome`, `run_job` adds `describe_failure`; `launch` prints it and exits with
`exit_status`.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from horovod.observe.reports.amounts import align_columns, count_of
from horovod.runner.output.console import Console
from horovod.runner.output.lines import Line

_KEPT_LINES = 200
_KEPT_BYTES = 2000
_SHOWN_LINES = 30
_TRACEBACK = "Traceback (most recent call last):"


class LaunchError(Exception):
    """The job cannot be started; the message is for the person who typed the command."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class Tail:
    """The last lines of a stream, without its progress bars; bounded in memory."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)

    def add(self, lines: Iterable[Line]) -> None:
        self._lines.extend(line.text[:_KEPT_BYTES] for line in lines if line.end != b"\r")

    def lines(self) -> list[str]:
        """Return the last 30 lines, or more if the last traceback began earlier."""
        kept = [line.decode(errors="replace") for line in self._lines]
        while kept and not kept[-1].strip():
            kept.pop()
        start = max(0, len(kept) - _SHOWN_LINES)
        for index in range(start - 1, -1, -1):
            if _TRACEBACK in kept[index]:
                start = index
                break
            if _TRACEBACK in "".join(kept[start:]):
                break
        return kept[start:]


@dataclass(frozen=True)
class Exit:
    """The end of a worker; ``code`` is negative after a signal."""

    rank: int
    pid: int
    code: int
    host: str = "localhost"
    because_of: tuple[int, ...] | None = None  # the ranks whose loss made it fail, if it said so
    loss: str = ""  # how it was lost, where its exit code does not say that
    worker: int = -1  # its number, in an elastic job

    @property
    def status(self) -> int:
        """The exit status as a shell would report it."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self) -> str:
        if self.loss:
            return self.loss
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"killed by {name} (exit code {self.status})"


@dataclass(frozen=True)
class LostHost:
    """A host whose agent, or the connection to it, ended while its workers ran."""

    name: str
    ranks: Sequence[int]
    how: str
    last_words: str  # the last error text of ssh or the agent


@dataclass
class Outcome:
    """Everything on which the exit status and the report depend."""

    exits: list[Exit] = field(default_factory=list)  # in the order in which workers ended
    first_failure: Exit | None = None
    early_exits: Sequence[Exit] = ()  # ranks that others waited for in vain: the cause
    lost: LostHost | None = None  # the host whose loss ended the job
    interrupted: int | None = None  # the signal that the launcher got first
    output_lost: bool = False
    problem: str = ""  # the reason why the launcher itself could not go on
    problem_status: int = 1
    account: str = ""  # the account of the first failure, for people

    def note_lost_output(self, console: Console) -> None:
        """Take over from the console whether and why output was lost, which ends a job."""
        self.output_lost = console.broken
        self.problem = self.problem or console.problem


def first_to_fail(batch: Sequence[Exit]) -> Exit | None:
    """Return the root cause among workers that have ended; None if none has failed.

    Workers that say that they failed because of others come last. Among the rest, a rank that was
    killed cannot have failed because of others. A rank that exited with an error can: it may have
    noticed the loss of a peer by other means than ours.
    """
    failed = [one for one in batch if one.code != 0]
    failed = [one for one in failed if one.because_of is None] or failed
    killed = [one for one in failed if one.code < 0 and -one.code != signal.SIGABRT]
    return next(iter(killed or failed), None)


class CauseFinder:
    """Finds the rank that made a job with fixed ranks fail.

    The order of failures means little: a lost rank often ends after the ranks that failed because
    of it. But these leave a note that names it (`horovod.common.generations.loss_note`).
    """

    def __init__(self) -> None:
        self.failures: list[Exit] = []  # in the order in which they were seen

    def add(self, failures: Iterable[Exit]) -> None:
        self.failures += failures

    def awaited(self, running: Collection[int]) -> set[int]:
        """Return ranks that still run and that others name as the cause of their failure."""
        return self._named() & set(running)

    def first(self) -> Exit | None:
        """Return the exit whose code and stderr say most about the failure."""
        failure = first_to_fail(self.failures)
        failed = {one.rank: one for one in self.failures}
        passed: list[Exit] = []
        while failure is not None and failure not in passed:
            passed.append(failure)
            named = [failed[rank] for rank in failure.because_of or () if rank in failed]
            failure = next((one for one in named if one is not failure), failure)
        if failure is None:
            return None
        # Ranks at both ends of a broken link name each other. So do a rank that hung for a while
        # and one that waited for it; but all that waited name the rank that hung, which ends last.
        circle = passed[passed.index(failure) :]
        return max(circle, key=self._suspicion)

    def _suspicion(self, one: Exit) -> tuple[int, int]:
        """Return how many ranks name a rank, and how late it has ended."""
        count = sum(one.rank in (other.because_of or ()) for other in self.failures)
        return count, self.failures.index(one)

    def early_exits(self, exits: Sequence[Exit]) -> list[Exit]:
        """Return the exits of ranks that others waited for in vain: they had left, or hung."""
        guilty = self._named() - {one.rank for one in self.failures}
        ended = [one for one in exits if one.rank in guilty]
        return [one for one in ended if one.code == 0] or ended

    def _named(self) -> set[int]:
        """Return the ranks that others name as the cause; none if any rank failed by itself."""
        if any(one.because_of is None for one in self.failures):
            return set()
        return {rank for one in self.failures for rank in one.because_of or ()}


def exit_status(outcome: Outcome) -> int:
    """Return the exit status of horovodrun."""
    if outcome.first_failure is not None:
        return outcome.first_failure.status
    if outcome.lost is not None:
        return 1
    if outcome.problem:
        return outcome.problem_status
    if outcome.interrupted is not None:
        return 128 + outcome.interrupted
    if outcome.output_lost:
        return 128 + signal.SIGPIPE
    return 0


def describe_failure(outcome: Outcome, tail: Sequence[str], log: str | None = None) -> str:
    """Return the account of the first failure; empty if nothing failed.

    Args:
        outcome: The outcome of the job.
        tail: The last lines of the stderr of the worker that failed first.
        log: The file that has all of that stderr, if there is one.
    """
    first, lost, early = outcome.first_failure, outcome.lost, outcome.early_exits
    if first is not None and early:
        rows = [(str(one.rank), one.host, str(one.pid), _how_early(one)) for one in early]
    elif first is not None:
        rows = [(str(first.rank), first.host, str(first.pid), first.describe())]
    elif lost is not None:
        rows = [(format_ranks(lost.ranks), lost.name, "-", lost.how)]
        tail = lost.last_words.splitlines()
    else:
        return ""
    rows.insert(0, ("rank", "host", "pid", "ended with"))
    table = [f"  {line}" for line in align_columns(rows)]
    text = [
        "",
        "Horovod detected that one or more processes exited with non-zero status, and ended the "
        f"job. {'The cause' if early else 'The first to fail'} was:",
        "",
        *table,
        "",
    ]
    if first is not None and early:
        where = f" (all of it: {log})" if log else ""
        text.append(f"Last lines of the stderr of rank {first.rank}, which needed it{where}:")
    elif first is None:
        text.append("Its last words:" if tail else "It said nothing.")
    elif tail:
        text.append(f"Last lines of its stderr{f' (all of it: {log})' if log else ''}:")
    else:
        is_killed = -first.code == signal.SIGKILL and not first.loss
        hint = " SIGKILL often means that the machine ran out of memory (see dmesg)."
        text.append(f"It wrote nothing to stderr.{hint if is_killed else ''}")
    if tail:
        text += ["", *(f"  {line}".rstrip() for line in tail)]
    if first is not None and any(line.startswith("bdb.BdbQuit") for line in tail):
        text += ["", f"breakpoint() needs somebody to talk to: horovodrun --attach {first.rank}"]
    text += [*_others(outcome, first), ""]
    return "\n".join(text) + "\n"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in the form ``0-3,5``."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _how_early(one: Exit) -> str:
    if -one.code in (signal.SIGTERM, signal.SIGKILL):  # we have ended it
        return "took no part in what other ranks waited for, and ran on until it was ended"
    return f"{one.describe()}, while other ranks still needed it for a collective operation"


def _others(outcome: Outcome, first: Exit | None) -> list[str]:
    later = [
        one
        for one in outcome.exits
        if one is not first
        and one.code != 0
        and -one.code not in (signal.SIGTERM, signal.SIGKILL)  # we have ended it
    ]
    if not later:
        return []
    ranks = ", ".join(str(one.rank) for one in sorted(later, key=lambda one: one.rank))
    which = f"Rank {ranks}" if len(later) == 1 else f"Ranks {ranks}"
    if first is not None and all(one.because_of is not None for one in later):
        count = count_of(len(later), "other rank")
        return ["", f"{count} failed because of it ({format_ranks([one.rank for one in later])})."]
    return ["", f"{which} failed after it: for the same reason, or because it was gone."]
