"""The job controller: it runs the processes of one job on a set of hosts, as a policy says.

Every job that starts processes makes a `JobController`: horovodrun and horovod.run, Spark, and
elastic jobs on Ray. Three parts work together:

- The hosts (`HostSet`) start and stop workers. `agent_set.AgentSet` has an agent on each host: on
  this machine, through ssh, srun or a command of the user's, on hosts that join by themselves, and
  in Spark tasks. A cluster that starts processes itself has its own: `horovod.ray.node_set`.
- The policy (`JobPolicy`) says which hosts and workers there are: `jobs.fixed_ranks` for a fixed
  set of ranks, `elastic.driver` for workers that come and go.
- The controller owns the loop (`supervise`) and the job's store. It lets hosts that have answered
  find the way to the store, kills what a lost agent leaves on this machine, and reports each event
  to the policy. It shows what the job waits for, and writes the account of a failure.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from horovod.common.store import MemoryStore
from horovod.common.topology import Slot
from horovod.common.wire import encode_key, new_key
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.local_host import signal_groups
from horovod.runner.agents.store_endpoints import StoreEndpoints
from horovod.runner.agents.supervise import Supervisor
from horovod.runner.output.console import Console
from horovod.runner.output.outputs import Outputs
from horovod.runner.output.progress import Progress
from horovod.runner.output.report import LaunchError, Outcome, describe_failure
from horovod.runner.output.watcher import JobWatcher
from horovod.runner.slots.worker_env import KEY

_TICK = 0.5
"""Seconds between two calls of `JobPolicy.tick`."""

_REST_SECONDS = 5.0
"""Seconds after which a host that could not be used is tried again."""

_SWEEP_PATIENCE = 20.0
"""Seconds that ending what a lost agent has left may take; the host may be out of reach."""


class Host(Protocol):
    """A host that reports an event."""

    @property
    def name(self) -> str: ...


class HostSet(ABC):
    """All hosts that are wanted. A host that cannot be used rests before it is tried again.

    It reports events to the methods `ready`, `started`, `could_not_start`, `exited` and `lost` of
    the `JobController`.
    """

    def __init__(self) -> None:
        self._rests: dict[str, float] = {}  # by host: when it may be tried again

    def first(self, slots: Mapping[str, int], most: int | None) -> list[str]:
        """Return as many of these hosts as `most` workers need; resting hosts add no capacity."""
        chosen, room = [], 0
        for name, count in slots.items():
            if most is not None and room >= most:
                break
            chosen.append(name)
            room += 0 if self._rests_now(name) else count
        return chosen

    def rest(self, name: str) -> None:
        """Try nothing on a host for a while."""
        self._rests[name] = time.monotonic() + _REST_SECONDS

    def _rests_now(self, name: str) -> bool:
        return time.monotonic() < self._rests.get(name, 0.0)

    @abstractmethod
    def want(self, names: Sequence[str]) -> dict[str, LaunchError]:
        """Prepare these hosts; return those that cannot even be tried, with the reasons."""

    @abstractmethod
    def let_go(self, name: str) -> None:
        """Release a host that is not needed any more and has no workers."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the hosts that are wanted."""

    @abstractmethod
    def is_ready(self, name: str) -> bool:
        """Return whether workers can be started on a host."""

    @abstractmethod
    def is_connecting(self, name: str) -> bool:
        """Return whether a host is wanted but not ready yet."""

    @abstractmethod
    def met(self, host: Any) -> LaunchError | None:
        """Find out how a host that has answered reaches the store; return a problem, or None."""

    def probed(self, host: Any, answer: Mapping[str, Any]) -> LaunchError | None:
        """Take the answer to a question that `met` asked; return a problem, or None."""
        return None

    def lost(self, host: Any) -> bool:
        """Remove a host that is gone by itself; return whether it was wanted."""
        return False

    @abstractmethod
    def start(self, name: str, worker: int, index: int, slots: int, slot: Slot | None) -> None:
        """Start a worker.

        Args:
            name: The host.
            worker: The worker's number.
            index: The slot of the host that the worker occupies.
            slots: The number of slots of the host.
            slot: The ranks that the worker will have if nothing unexpected happens. Programs
                look for them in their environment before they call `init`, which returns the real
                ones.
        """

    def obstacle(self) -> str:
        """Return why workers that should start have not done so for a while; empty if unknown."""
        return ""

    @abstractmethod
    def stop(self, name: str, worker: int, grace: float) -> None:
        """End a worker, by force after `grace` seconds; do nothing if its host is lost."""

    @abstractmethod
    def obeys(self, name: str) -> bool:
        """Return whether a worker that was stopped on this host is certainly gone."""


def assignment_variables(slot: Slot | None) -> dict[str, str]:
    """Return the environment in which a worker finds the ranks that it will probably have."""
    facts = {} if slot is None else vars(slot.topology)
    return {f"HOROVOD_{fact.upper()}": str(value) for fact, value in facts.items()}


class JobPolicy(ABC):
    """Says what one kind of job does when something happens. The controller makes all calls."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.blamed_worker: int | None = None  # the worker whose failure the outcome is about

    @abstractmethod
    def begin(self) -> None:
        """Begin the job: the loop starts next.

        Raises:
            LaunchError: If the job cannot begin.
        """

    @abstractmethod
    def host_ready(self, name: str) -> None:
        """React to a host on which workers can be started now."""

    @abstractmethod
    def host_failed(self, name: str, problem: LaunchError) -> None:
        """React to a wanted host that cannot be used, before any worker was started there."""

    @abstractmethod
    def host_lost(self, agent: HostAgent, code: int) -> None:
        """React to the end of an agent that had answered; `code` is its exit code."""

    @abstractmethod
    def started(self, host: str, worker: int, pid: int) -> None:
        """React to a worker that runs."""

    @abstractmethod
    def could_not_start(self, host: str, worker: int, problem: LaunchError) -> None:
        """React to a worker that will never run."""

    @abstractmethod
    def exited(self, host: str, exits: Sequence[tuple[int, int]]) -> None:
        """React to workers found dead at the same moment: ids, and codes, negative for signals."""

    @abstractmethod
    def tick(self) -> str | None:
        """Check deadlines; the controller calls this twice a second.

        Returns:
            A line for people about what the job waits for; empty if it waits for nothing. None if
            `tick` need not be called any more.
        """

    def close(self) -> None:  # noqa: B027
        """Release what `begin` has opened; the loop has ended, perhaps with an exception."""

    def end(self) -> None:  # noqa: B027
        """Complete the outcome; the loop has ended without an exception."""


class JobController:
    """Runs one job. It is the `supervise.Handler` of the job's loop."""

    def __init__(
        self,
        console: Console,
        outputs: Outputs | None = None,
        *,
        store: MemoryStore | None = None,
        key: bytes | None = None,
        watcher: JobWatcher | None = None,
        pass_interrupts_on: bool = False,
    ) -> None:
        """Prepare a job.

        Args:
            console: Where messages for people go.
            outputs: Receiver of the workers' output; by default it goes to the console.
            store: The job's store, which may have values for the workers; by default a new one.
            key: The job's key; by default a new one.
            watcher: Receiver of the job's events; by default there is none.
            pass_interrupts_on: Whether Ctrl-C reaches the workers as SIGINT instead of SIGTERM.
        """
        self.console = console
        self.watcher = watcher or JobWatcher()
        self.outputs = outputs or Outputs(console, watcher=self.watcher)
        self.endpoints = StoreEndpoints(key or new_key(), store)
        self.supervisor = Supervisor(console, self.outputs, pass_interrupts_on, self.watcher)
        self._progress = Progress(console, status=self.watcher.status)
        self._pids: dict[str, dict[int, int]] = {}  # of the workers that run, by host
        self._sweepers: list[HostAgent] = []  # agents that end what lost agents left behind

    def run(self, hosts: HostSet, policy: JobPolicy) -> Outcome:
        """Run the job to its end.

        Args:
            hosts: The hosts, on which it starts and stops workers.
            policy: The rules of this kind of job.

        Returns:
            The outcome, which says what went wrong, if anything.

        Raises:
            LaunchError: If the job cannot even begin.
        """
        self._hosts, self._policy = hosts, policy
        try:
            policy.begin()
            self._tick()
            self.supervisor.run(self)
        finally:
            policy.close()
        outcome = policy.outcome
        outcome.interrupted = next(iter(self.supervisor.signals), None)
        outcome.note_lost_output(self.console)
        policy.end()
        blamed = policy.blamed_worker
        tail = [] if blamed is None else self.outputs.tail(blamed)
        log = None if blamed is None else self.outputs.log(blamed)
        outcome.account = describe_failure(outcome, tail, log)
        return outcome

    def close(self) -> None:
        """End everything that is left of the job."""
        self.supervisor.close()
        self.endpoints.close()
        self.outputs.close()

    def __enter__(self) -> JobController:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- for the policy --------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether the job was stopped, or the launcher was told to end."""
        return self.supervisor.stopping or bool(self.supervisor.signals)

    def _tick(self) -> None:
        awaited = None if self.supervisor.stopping else self._policy.tick()
        self._progress.update("" if self.is_ending else awaited or "")
        goes_on = awaited is not None or (self._progress.has_status and not self.is_ending)
        if goes_on and not self.supervisor.stopping:
            self.supervisor.call_later(_TICK, self._tick)

    # -- what the hosts say ----------------------------------------------------------------

    def ready(self, host: Any) -> None:
        if host in self._sweepers:
            return
        self._note_connection(host.name, self._hosts.met(host))

    def probed(self, agent: HostAgent, answer: dict[str, Any]) -> None:
        self._note_connection(agent.name, self._hosts.probed(agent, answer))

    def _note_connection(self, name: str, problem: LaunchError | None) -> None:
        if problem:
            self._policy.host_failed(name, problem)
        elif self._hosts.is_ready(name):
            self._policy.host_ready(name)

    def started(self, host: Host, worker: int, pid: int) -> None:
        self._pids.setdefault(host.name, {})[worker] = pid
        self._policy.started(host.name, worker, pid)

    def failed(self, agent: HostAgent, worker: int, number: int, what: str) -> None:
        if number == errno.ECANCELED:  # we stopped the job before this start
            return
        why = f"{what!r}: {os.strerror(number)}" if what else os.strerror(number)
        if number == errno.EMFILE:
            why = f"{os.strerror(number)} (each worker takes two pipes; see 'ulimit -n')"
        elif number == errno.ENOENT and what and "/" not in what:
            why = f"command not found: {what!r}"
        status = 127 if number == errno.ENOENT else 126
        self.could_not_start(agent, worker, LaunchError(why, status))

    def could_not_start(self, host: Host, worker: int, problem: LaunchError) -> None:
        """Take notice of a worker that will never run, and why."""
        self._policy.could_not_start(host.name, worker, problem)

    def exited(self, host: Host, exits: Sequence[tuple[int, int]]) -> None:
        for worker, _ in exits:
            self._pids.get(host.name, {}).pop(worker, None)
        self._policy.exited(host.name, exits)

    def lost(self, agent: HostAgent, code: int) -> None:
        if agent in self._sweepers:
            return  # the host is out of reach: a living agent there notices that, and ends all
        pids = self._pids.pop(agent.name, {})
        if not agent.remote:
            signal_groups(pids.values(), signal.SIGKILL)
        if self._hosts.lost(agent):
            if agent.hello is not None:
                self._policy.host_lost(agent, code)
            elif not self.supervisor.stopping:
                why = f"cannot start on {agent.name}: {agent.explain_end(code)}"
                self._policy.host_failed(agent.name, LaunchError(why))
        has_left_something = bool(pids) or bool(agent.given_up)
        if has_left_something and agent.hello and agent.starter and not agent.finished:
            self._sweep(agent, list(pids.values()))

    def _sweep(self, lost: HostAgent, pids: Sequence[int]) -> None:
        """Let a new agent end what a lost one has left on its host, if the host can be reached.

        An agent that lost its connection ends everything itself; a killed or stopped one cannot.
        """
        try:
            agent = HostAgent(lost.name, lost.starter)
        except (ValueError, OSError):
            return
        self._sweepers.append(agent)
        agent.sweep((lost.hello or {})["pid"], pids, f"{KEY}={encode_key(self.endpoints.key)}")
        agent.finish()
        self.supervisor.add(agent)
        self.supervisor.call_later(_SWEEP_PATIENCE, agent.abandon)
