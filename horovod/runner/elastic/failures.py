"""Record failures of workers and hosts: in the job's state, for people, and against the host.

`driver` and `liveness` report every loss here. The other workers learn of it by the next decision.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from horovod.common.generations.decisions import DRIVER_LOST
from horovod.observe.reports.amounts import count_of
from horovod.runner.agents.controller import HostSet
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.elastic.discovery import HostManager
from horovod.runner.elastic.job_state import JobState, Process
from horovod.runner.output.watcher import Status

_FENCE_SECONDS = 60.0
"""Seconds within which workers on a lost host end themselves, because they cannot reach us."""


class Failures:
    """Records what the job has lost."""

    def __init__(
        self, state: JobState, hosts: HostSet, manager: HostManager, status: Status
    ) -> None:
        self._state = state
        self._hosts = hosts
        self._manager = manager
        self._status = status

    def failed(self, process: Process, code: int) -> None:
        """Record a worker that has ended by itself with an error."""
        lost_driver = "could not reach the driver any more"
        how = lost_driver if code == DRIVER_LOST else process.exit(code).describe()
        self._note(process, code, how)
        self.blame(process.host)

    def could_not_start(self, process: Process, why: str) -> None:
        self._state.note_failure(process, 127)
        self.blame(process.host, f"cannot start a worker on {process.host}: {why}")

    def give_up(self, process: Process, why: str) -> None:
        """Remove a worker that lives but does not answer from the job.

        It is killed if its host can be reached. Otherwise it may wake up later: then it finds that
        it is not a part of the job any more, or cannot reach us, and ends itself.
        """
        self._hosts.stop(process.host, process.number, 0.0)
        if not self._hosts.obeys(process.host):
            self._fence()
        self._note(process, -signal.SIGKILL, why)
        self.blame(process.host)

    def lost_host(self, agent: HostAgent, said: str) -> None:
        """Record the loss of a host, and with it of its workers; ``said`` is the reason."""
        workers = self._state.workers_on(agent.name)
        if agent.remote:
            self._fence()
        for process in workers:
            if process.is_dismissed:
                del self._state.alive[process.number]
            else:
                self._note(process, -signal.SIGKILL, "lost with its host")
        self.blame(agent.name, f"the connection to {agent.name} is lost: {said}")

    def blame(self, host: str, why: str = "") -> None:
        """Count one more failure against a host; `why` says how the host itself failed."""
        if why:
            self._state.host_problem = why
            self._status.announce(why, "host failed", host=host)
        if self._manager.record_failure(host):
            failures = self._manager.blacklisting.failures(host)
            self._status.announce(
                f"{host} gets no new workers after {count_of(failures, 'failure')}"
                + ("" if self._manager.blacklisting.is_for_good(host) else ", for a while"),
                "blacklisted",
                host=host,
            )

    def _note(self, process: Process, code: int, how: str) -> None:
        self._state.note_loss(process, code, how)
        said = {} if process.because_of is None else {"because_of": process.because_of}
        facts: dict[str, Any] = {"worker": process.name, "host": process.host, "how": how, **said}
        if self._state.finishing and not process.is_done:  # there may be no decision that tells it
            text = f"{process} failed: {how}; others have finished"
            self._status.announce(text, "failed", **facts)
        else:
            self._status.note("failed", **facts)

    def _fence(self) -> None:
        self._state.fenced_until = time.monotonic() + _FENCE_SECONDS
