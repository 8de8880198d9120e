"""Which hosts have failed too often to be used.

A host may lose a number of workers before it is blacklisted (1: upstream's rule). Without a
cooldown range that is for good; with one the host may come back after a time that doubles with
every blacklisting, from the lower to the upper end of the range, and starts with a clean record.
Pure: the clock and the dice are given. Used by `discovery.HostManager`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable


class Blacklist:
    """The record of all hosts."""

    def __init__(
        self,
        max_failures: int = 1,
        cooldown_range: tuple[float, float] | None = None,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._max_failures = max_failures
        self._range = cooldown_range
        self._dice = dice
        self._failures: dict[str, int] = {}
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def record_failure(self, host: str, now: float) -> bool:
        """One more failure on a host; whether it is blacklisted because of it.

        Failures of a host that is blacklisted already do not prolong that.
        """
        if self.is_blacklisted(host, now):
            return False
        self._failures[host] = self._failures.get(host, 0) + 1
        if self._failures[host] < self._max_failures:
            return False
        self.add(host, now)
        return True

    def add(self, host: str, now: float) -> None:
        """Blacklist a host, whatever its record."""
        if not self.is_blacklisted(host, now):
            self._times[host] = self._times.get(host, 0) + 1
            self._until[host] = now + self._delay(self._times[host])

    def is_blacklisted(self, host: str, now: float) -> bool:
        until = self._until.get(host)
        if until is None:
            return False
        if now < until:
            return True
        del self._until[host]
        self._failures.pop(host, None)
        return False

    def is_for_good(self, host: str) -> bool:
        return math.isinf(self._until.get(host, 0.0))

    def failures(self, host: str) -> int:
        """How many count against a host now."""
        return self._failures.get(host, 0)

    def _delay(self, times: int) -> float:
        if self._range is None:
            return math.inf
        lower, upper = self._range
        # Dice, so that hosts that failed together do not come back together.
        return min(upper, lower * 2.0 ** min(times - 1, 60) + self._dice() * lower)
