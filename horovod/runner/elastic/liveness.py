"""Whether workers come when the driver has decided, and what happens to those who do not.

A worker answers a decision twice: its process has heard of it, and later the training has come to
meet the others (`horovod.common.decisions`). The driver gives up who does not answer in time. And
workers whose generation broke though nobody died meet again by themselves; when one of them is
missing, all are called by a new decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from horovod.common.decisions import Decision
from horovod.runner.elastic.failures import Failures
from horovod.runner.elastic.job_state import JobState, Limits, Process
from horovod.runner.elastic.status import listing

_ABSENCE_SECONDS = 5.0
"""Seconds that workers whose generation broke wait for one another before all are called."""


class Liveness:
    """Minds the answers. `later(seconds, do)` is a timer, `reconcile` wakes the driver."""

    def __init__(
        self,
        limits: Limits,
        state: JobState,
        failures: Failures,
        later: Callable[[float, Callable[[], None]], None],
        reconcile: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._state = state
        self._failures = failures
        self._later = later
        self._reconcile = reconcile

    def begin(self, decision: Decision) -> None:
        """A decision has been made: from now on its workers have time to answer."""
        self._later(self._limits.answer_timeout, lambda: self._check_heard(decision.number))
        self._later(self._limits.elastic_timeout, lambda: self._check_entered(decision))

    def entered(self, number: int, attempt: int) -> None:
        """A worker has come to meet the others. Again, though nobody died? Then all must come."""
        if number != self._state.number:
            return
        if self._state.finished and (attempt or not self._state.formed):
            self._ask(number, attempt)
        elif attempt:
            self._later(_ABSENCE_SECONDS, lambda: self._ask(number, attempt))

    def finished(self) -> None:
        """Somebody has finished; who waits for the newest generation must not wait for that one."""
        state = self._state
        if not state.formed:
            waiting = any(member.entered[0] == state.number for member in state.members())
            state.asked |= state.too_few or waiting

    def _ask(self, number: int, attempt: int) -> None:
        state = self._state
        absent = state.absent(number, attempt)
        if number != state.number or not (absent or state.finished):
            return
        if absent:
            who = listing([str(process) for process in absent])
            state.causes.append(f"the others have lost {who}")
        state.asked = True
        self._reconcile()

    def _check_heard(self, number: int) -> None:
        """Processes that do not even notice a decision are stopped, swapping, or cut off."""
        late = self._state.behind(number)
        self._give_up(late, f"did not react within {self._limits.answer_timeout:g} s")

    def _check_entered(self, decision: Decision) -> None:
        """After a failure everybody comes back to meet, unless the program hangs elsewhere."""
        newest = decision.number == self._state.number
        if newest and not decision.too_few and decision.kind in ("failure", "start"):
            late = self._state.absent(decision.number)
            seconds = self._limits.elastic_timeout
            self._give_up(late, f"did not come back to training within {seconds:g} s")

    def _give_up(self, processes: Sequence[Process], why: str) -> None:
        for process in processes:
            self._failures.give_up(process, why)
        if processes:
            self._reconcile()
