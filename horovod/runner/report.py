"""What became of a job: its exit status, and the account of the first failure.

`supervise` fills an `Outcome` in, `launch` prints `describe_failure` and exits with `exit_status`.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from horovod.runner.lines import Line

_KEPT_LINES = 200
_KEPT_BYTES = 2000
_SHOWN_LINES = 30
_TRACEBACK = "Traceback (most recent call last):"


class Tail:
    """The last lines of a stream, without its progress bars; bounded in memory."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)

    def add(self, lines: Iterable[Line]) -> None:
        self._lines.extend(line.text[:_KEPT_BYTES] for line in lines if line.end != b"\r")

    def lines(self) -> list[str]:
        """The last 30 lines, and more where a traceback began earlier."""
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
    """How a worker ended; ``code`` is negative after a signal."""

    rank: int
    pid: int
    code: int

    @property
    def status(self) -> int:
        """As a shell would report it."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"killed by {name} (exit code {self.status})"


@dataclass
class Outcome:
    """Everything the exit status and the report depend on."""

    exits: list[Exit] = field(default_factory=list)  # in the order of dying
    first_failure: Exit | None = None
    interrupted: int | None = None  # the signal that the launcher got first
    output_lost: bool = False
    problem: str = ""  # what kept the launcher itself from doing its work
    problem_status: int = 1


def first_to_fail(batch: Sequence[Exit]) -> Exit | None:
    """The root cause among workers that were found dead at the same moment.

    A rank that was killed cannot have failed because of the others, one that exited with an
    error can: losing a peer makes a collective raise within milliseconds.
    """
    failed = [one for one in batch if one.code != 0]
    killed = [one for one in failed if one.code < 0 and -one.code != signal.SIGABRT]
    return next(iter(killed or failed), None)


def exit_status(outcome: Outcome) -> int:
    """What horovodrun exits with."""
    if outcome.first_failure is not None:
        return outcome.first_failure.status
    if outcome.problem:
        return outcome.problem_status
    if outcome.interrupted is not None:
        return 128 + outcome.interrupted
    if outcome.output_lost:
        return 128 + signal.SIGPIPE
    return 0


def describe_failure(
    outcome: Outcome, hostname: str, tail: Sequence[str], log: str | None = None
) -> str:
    """The account of the first failure; empty when no rank failed."""
    first = outcome.first_failure
    if first is None:
        return ""
    rows = [
        ("rank", "host", "pid", "ended with"),
        (str(first.rank), hostname, str(first.pid), first.describe()),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    text = [
        "",
        "Horovod detected that one or more processes exited with non-zero status, and ended the "
        "job. The first to fail was:",
        "",
        *table,
        "",
    ]
    if tail:
        text += [f"Last lines of its stderr{f' (all of it: {log})' if log else ''}:", ""]
        text += [f"  {line}".rstrip() for line in tail]
    else:
        text.append(f"It wrote nothing to stderr.{_hint(first)}")
    text += [*_others(outcome, first), ""]
    return "\n".join(text) + "\n"


def _hint(first: Exit) -> str:
    if -first.code == signal.SIGKILL:
        return " SIGKILL often means that the machine ran out of memory (see dmesg)."
    return ""


def _others(outcome: Outcome, first: Exit) -> list[str]:
    later = [
        one
        for one in outcome.exits
        if one is not first
        and one.code != 0
        and -one.code not in (signal.SIGTERM, signal.SIGKILL)  # that was us
    ]
    if not later:
        return []
    ranks = ", ".join(str(one.rank) for one in sorted(later, key=lambda one: one.rank))
    which = f"Rank {ranks}" if len(later) == 1 else f"Ranks {ranks}"
    return ["", f"{which} failed after it: for the same reason, or because it was gone."]
