"""The parts of a benchmark: one that fails, or for which no time is left, does not lose the others.

Used by the benchmarks that are run on machines lent for minutes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from benchmarks.processes import JobFailed, positive

T = TypeVar("T")

LEAST = 10.0  # seconds; no job starts and measures anything in less


def add_limit_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        type=positive,
        default=math.inf,
        metavar="S",
        help="start nothing more and give up what runs after this many seconds in all, and show "
        "what was measured",
    )


class Parts:
    """Runs parts one after the other within limits of time, and remembers which are missing."""

    def __init__(self, each: float, total: float = math.inf) -> None:
        """`each` is the most seconds for one part, `total` for all of them together."""
        self.missing: list[str] = []  # the parts that failed or were left out
        self._each = each
        self._total = total
        self._end = time.monotonic() + total

    @property
    def left(self) -> float:
        """Seconds that all parts together still have."""
        return self._end - time.monotonic()

    def attempt(self, name: str, work: Callable[[float], T]) -> T | None:
        """What `work` returns, which is told how many seconds it may take; None if it failed."""
        if self.left < LEAST:
            print(f"{name}: left out, the {self._total:g} s of --limit are over", flush=True)
            self.missing.append(name)
            return None
        try:
            return work(min(self._each, self.left))
        except JobFailed as failure:
            sys.stdout.flush()
            print(f"{failure.code}\n\n{name}: FAILED, see above", file=sys.stderr, flush=True)
            self.missing.append(name)
            return None

    def explain(self) -> None:
        """Say at the end what is missing."""
        if self.missing:
            print(f"Failed or left out: {'; '.join(self.missing)}", flush=True)
