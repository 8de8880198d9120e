"""Time limits: the error for what did not happen in time, and a clock that raises it."""

from __future__ import annotations

import time


class TimeoutException(TimeoutError):
    """Something that was waited for did not happen in time."""


class Timeout:
    """So many seconds from now. `message` says what to do, and may have ``{activity}``."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._end_of_day = time.time() + timeout
        self._message = message

    def remaining(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self._end - time.monotonic())

    def timeout_at(self) -> float:
        """When the time is up, as `time.time` counts."""
        return self._end_of_day

    def timed_out(self) -> bool:
        return self.remaining() == 0.0

    def check_time_out_for(self, activity: str) -> None:
        """`TimeoutException` if the time is up."""
        if self.timed_out():
            told = self._message.format(activity=activity)
            raise TimeoutException(f"{told} Timeout after {self._timeout:g} seconds.")
