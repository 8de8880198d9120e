"""A fault that waits for its moment: those who have the state are lost while they hand it over.

As soon as the first of several new workers has received the state, the hosts of all that had it
before lose their power, with what they were about to send to the other new ones. So a worker that
has nothing may be the oldest that is left.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from tests.simulation.plan import Fault
from tests.simulation.processes import Process

if TYPE_CHECKING:
    from tests.simulation.job import Cluster


class HandOver:
    """Waits until a worker that is new has the state."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._fault: Fault | None = None
        self._holders: list[Process] = []  # workers that have, or had, the state

    def arm(self, fault: Fault) -> None:
        """Begin to wait."""
        self._fault = fault

    def take_begin(self, worker: Process) -> None:
        """A worker begins to train: it has the state."""
        if worker in self._holders:
            return
        old = [each for each in self._holders if not each.is_gone]
        if self._fault is not None and old:
            self._cluster.world.note(f"those who gave {worker} the state are lost")
            for each in old:
                self._lose(each, worker, self._fault.seconds)
            self._fault = None
        self._holders.append(worker)

    def _lose(self, worker: Process, heir: Process, seconds: float) -> None:
        host, later = worker.host, self._cluster.world.later
        if host is heir.host:
            later(0.0, lambda: worker.signal(signal.SIGKILL))
        else:
            later(0.0, host.lose_power)
            later(seconds, host.boot)
