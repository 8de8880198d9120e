"""Run a job with a fixed set of ranks, from the start of its agents to the end of all processes.

`run_job` makes a `StaticJob` and lets the supervisor run it. An agent starts on every host. If a
host is another machine, each agent finds out how to reach the job's store. Then all workers start.
The first worker that fails, or the first host that is lost, ends the others.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.common.addresses import LOOPBACK
from horovod.common.loss_note import read_note
from horovod.runner.agents.host_agent import HostAgent, start_agent, start_command
from horovod.runner.agents.probe import interface_address
from horovod.runner.agents.processes import signal_groups
from horovod.runner.agents.store_endpoints import (
    Endpoint,
    StoreEndpoints,
    describe_problem,
    own_interfaces,
)
from horovod.runner.agents.supervise import FAILURE_GRACE, Supervisor, raise_descriptor_limit
from horovod.runner.jobs.request import (
    JobRequest,
    describe_threads,
    host_variables,
    worker_specs,
)
from horovod.runner.output.console import Colour
from horovod.runner.output.progress import TICK, Progress, StartProgress
from horovod.runner.output.report import (
    CauseFinder,
    Exit,
    LaunchError,
    LostHost,
    Outcome,
    format_ranks,
)
from horovod.runner.output.watcher import JobWatcher
from horovod.runner.slots.hosts import is_local
from horovod.runner.slots.worker_env import WorkerRendezvous

_BLAME_WINDOW = 0.5
"""Seconds to wait, when several hosts report failures, for the one that caused the others."""

_CAUSE_PATIENCE = 10.0
"""Seconds to wait, when ranks have failed because of another, for that one to end."""

_COMPANY_WINDOW = 2.0
"""Seconds to wait, when a host cannot be reached, for others that cannot either."""

_SLACK = 3.0
"""Seconds beyond ssh's own time limit, so that ssh can say what is wrong."""


class StaticJob:
    """Reacts to the events of such a job; `supervise.Handler` describes the methods."""

    def __init__(
        self,
        request: JobRequest,
        endpoints: StoreEndpoints,
        supervisor: Supervisor,
        agents: Sequence[HostAgent] = (),
        watcher: JobWatcher | None = None,
    ) -> None:
        """Prepare a job.

        Args:
            request: What to run.
            endpoints: The job's store.
            supervisor: The launcher's loop.
            agents: The agents of all hosts, if they already run; by default the job starts them.
            watcher: What follows the job.
        """
        self._watcher = watcher or JobWatcher()
        self.outcome = Outcome()
        self._request = request
        self._endpoints = endpoints
        self._supervisor = supervisor
        self._console = supervisor.console
        self._hosts = request.hosts
        self._all_local = not agents and request.all_local
        self._agents: dict[str, HostAgent] = {agent.name: agent for agent in agents}
        self._unreachable: dict[str, str] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._pids: dict[int, int] = {}
        self._running: set[int] = set()
        self._cause = CauseFinder()
        self._bystanders = 0
        self._awaits_cause = False  # whether it waits for ranks that are said to be the cause
        self._progress = Progress(supervisor.console, status=self._watcher.status)
        self._start = StartProgress(request.slots, list(self._hosts), self._all_local)

    def run(self) -> Outcome:
        """Run the job to its end."""
        workers = {str(slot.rank): [slot.hostname, slot.rank] for slot in self._request.slots}
        self._watcher.note("decision", number=0, workers=workers)
        if self._agents:
            for agent in self._agents.values():
                self._supervisor.add(agent)
            self._supervisor.call_later(self._request.start_timeout, self._give_up_waiting)
        else:
            self._start_agents()
        if len(self._request.slots) > 1:
            self._endpoints.store.watch(self._start.note_key)
        self._show_progress()
        self._supervisor.run(self)
        self._blame()
        outcome = self.outcome
        outcome.interrupted = next(iter(self._supervisor.signals), None)
        outcome.note_lost_output(self._console)
        return outcome

    def _show_progress(self) -> None:
        """Show what the job waits for until all ranks are in `init`, then how the job goes."""
        over = self._supervisor.stopping or bool(self._supervisor.signals)
        self._progress.update("" if over else self._start.describe_awaited(self._console.is_blank))
        if not over and (self._progress.has_status or not self._start.is_complete):
            self._supervisor.call_later(TICK, self._show_progress)

    # -- hosts -----------------------------------------------------------------------------

    def _start_agents(self) -> None:
        request = self._request
        names = sorted(self._hosts, key=lambda name: not is_local(name))
        raised = False
        for name in names:
            if not is_local(name) and not raised:
                # Only after the local agent has started: its workers keep the user's limit.
                raise_descriptor_limit(3 * len(names) + 4 * len(request.slots) + 128)
                raised = True
            try:
                self._agents[name] = start_agent(name, request.starter)
            except LaunchError as error:
                raise LaunchError(f"cannot start on {name}: {error}", error.status) from None
            self._supervisor.add(self._agents[name])
            if request.verbose > 1:
                command = shlex.join(start_command(name, request.starter))
                self._console.say(f"{name}: {command}")
        if raised:
            self._supervisor.call_later(request.start_timeout + _SLACK, self._give_up_waiting)

    def ready(self, agent: HostAgent) -> None:
        self._start.hosts_up.add(agent.name)
        if self._request.verbose:
            hello = agent.hello or {}
            self._console.say(f"{agent.name}: agent runs as pid {hello['pid']}")
        self._connect_if_complete()

    def _connect_if_complete(self) -> None:
        waiting = [name for name, agent in self._agents.items() if agent.hello is None]
        if self._supervisor.stopping or self._supervisor.signals:
            return
        if self._unreachable:
            if not set(waiting) - set(self._unreachable):
                self._give_up_hosts()
        elif not waiting:
            self._connect_hosts()

    def _give_up_waiting(self) -> None:
        for name, agent in self._agents.items():
            if agent.hello is None and name not in self._unreachable:
                seconds = self._request.start_timeout
                said = f":\n{agent.last_words}" if agent.last_words else ""
                self._unreachable[name] = f"no answer within {seconds:g} s{said}"
        if self._unreachable:
            self._give_up_hosts()

    def _give_up_hosts(self) -> None:
        if self._supervisor.stopping or self._supervisor.signals:
            return
        texts = [f"cannot start on {name}: {why}" for name, why in self._unreachable.items()]
        if any("Host key verification failed" in text for text in texts):
            texts.append(
                "ssh does not know the key of such a host: log in once by hand and check it, or "
                "put it into ~/.ssh/known_hosts"
            )
        self._problem("\n".join(texts))

    def _problem(self, text: str, status: int = 1, grace: float = 0.0) -> None:
        """End the job because of a problem; only the first problem is reported."""
        if not self.outcome.problem and not self._supervisor.signals:
            self.outcome.problem = text
            self.outcome.problem_status = status
        self._supervisor.stop(grace)

    # -- connecting ---------------------------------------------------------------------------

    def _connect_hosts(self) -> None:
        request = self._request
        nics = request.nics
        if nics and not any(interface_address(name) for name in nics):
            self._problem(
                f"this machine has no interface with an address among {', '.join(nics)} "
                f"(--network-interfaces); it has {', '.join(own_interfaces())}",
                status=2,
            )
        elif self._all_local:
            endpoint = self._endpoints.open(LOOPBACK)
            master = LOOPBACK, self._endpoints.reserve_port(LOOPBACK)
            self._start_workers(dict.fromkeys(self._hosts, endpoint), master)
        else:
            agents = [self._agents[name] for name in self._hosts]
            problem = self._endpoints.probe_all(agents, nics, request.start_timeout)
            if problem:
                self._problem(problem)

    def probed(self, agent: HostAgent, answer: dict[str, Any]) -> None:
        self._answers[agent.name] = answer
        self._start.connected.add(agent.name)
        if self._request.verbose > 1 and answer["endpoint"] is not None:
            address, port = answer["endpoint"]
            self._console.say(
                f"{agent.name}: reaches this machine at {address}, port {port}, and is reached by "
                f"other hosts at {answer['address']}"
            )
        if self._supervisor.stopping or self._supervisor.signals:
            return
        problem = describe_problem(agent.name, answer, self._request.nics)
        if problem:
            self._problem(problem, status=2 if answer["endpoint"] else 1)
        elif len(self._answers) == len(self._agents):
            endpoints = {
                name: (each["endpoint"][0], each["endpoint"][1])
                for name, each in self._answers.items()
            }
            self._endpoints.keep(set(endpoints.values()))
            first = self._answers[next(iter(self._hosts))]  # the host of rank 0
            master = LOOPBACK if len(self._hosts) == 1 else first["address"]
            self._start_workers(endpoints, (master, first["port"]))

    # -- workers ---------------------------------------------------------------------------

    def _start_workers(self, endpoints: Mapping[str, Endpoint], master: tuple[str, int]) -> None:
        request = self._request
        for sentence in describe_threads(request, self._agents.values()):
            self._console.say(sentence)
        for name in self._hosts:
            agent = self._agents[name]
            key = self._endpoints.key
            rendezvous = WorkerRendezvous(*endpoints[name], master[1], key, master[0])
            env = host_variables(request, agent, rendezvous, self._interfaces(name))
            if request.verbose:
                for variable in sorted(env):
                    if variable.startswith(("HOROVOD_", "MASTER_")):
                        self._console.say(f"{name}: {variable}={env[variable]}")
            specs = worker_specs(request, agent)
            agent.start(specs, env)
            if request.attach is not None and any(spec.input for spec in specs):
                self._supervisor.attach(agent, request.attach)
            agent.finish()

    def _interfaces(self, name: str) -> list[str]:
        """Return the interfaces of a host for the traffic between ranks; none stands for all."""
        if name in self._answers:
            return list(self._answers[name]["nics"])
        return [nic for nic in self._request.nics if interface_address(nic)]

    def started(self, agent: HostAgent, worker: int, pid: int) -> None:
        self._pids[worker] = pid
        self._start.started.add(worker)
        self._running.add(worker)
        self._watcher.note("started", worker=str(worker), host=agent.name, pid=pid)
        if self._request.verbose:
            self._console.say(f"rank {worker} started{self._on(agent)}, pid {pid}")

    def failed(self, agent: HostAgent, worker: int, number: int, what: str) -> None:
        if number == errno.ECANCELED:
            return  # we stopped the job before this worker began
        why = os.strerror(number)
        if number == errno.EMFILE:
            why += " (each worker takes two pipes; see 'ulimit -n')"
        elif number == errno.ENOENT and "/" not in what:
            why = f"command not found: {what!r}"
        elif what:
            why = f"{what!r}: {why}"
        status = 127 if number == errno.ENOENT else 126
        self._problem(f"cannot start rank {worker}{self._on(agent)}: {why}", status)

    def exited(self, agent: HostAgent, exits: Sequence[tuple[int, int]]) -> None:
        batch = [self._exit(rank, code, agent.name) for rank, code in exits]
        self.outcome.exits += batch
        stopped = self._supervisor.stopping or bool(self._supervisor.signals)
        self._running -= {one.rank for one in batch}
        self._start.ended |= {one.rank for one in batch}
        for one in batch:
            how = {"code": one.code, "because_of": one.because_of, "stopped": stopped}
            self._watcher.note("exited", worker=str(one.rank), host=one.host, **how)
        for one in batch if self._request.verbose else ():
            self._console.say(f"rank {one.rank} ended: {one.describe()}")
        failures = [one for one in batch if one.code != 0]
        stopping = self._supervisor.stopping
        if self._supervisor.signals or (stopping and not self._cause.failures):
            return
        # A failure that is reported later may have happened earlier; what we have ended did not.
        self._cause.add(o for o in failures if not (stopping and -o.code == signal.SIGTERM))
        if self._cause.failures and not stopping:
            self._look_for_cause()

    def _exit(self, rank: int, code: int, host: str) -> Exit:
        because_of = read_note(self._endpoints.store, str(rank)) if code else None
        return Exit(rank, self._pids[rank], code, host, because_of)

    def _look_for_cause(self) -> None:
        """End the job, unless it waits for a rank that others name as the cause to end."""
        if not self._cause.awaited(self._running):
            self._end_others()
        elif not self._awaits_cause:
            self._awaits_cause = True
            self._supervisor.call_later(_CAUSE_PATIENCE, self._end_others)

    def _end_others(self) -> None:
        if self._supervisor.stopping or self._supervisor.signals:
            return
        self._bystanders = len(self._running)
        awaited = self._cause.awaited(self._running)
        self._supervisor.stop(FAILURE_GRACE)
        if len(self._agents) == 1 and not awaited:
            self._blame()
        else:
            self._supervisor.call_later(_BLAME_WINDOW, self._blame)

    def _blame(self) -> None:
        """Decide which of the failures so far is the cause."""
        failure = self._cause.first()
        if failure is None or self.outcome.first_failure is not None:
            return
        self.outcome.first_failure = failure
        early = self.outcome.early_exits = self._cause.early_exits(self.outcome.exits)
        if early:
            who = format_ranks([one.rank for one in early])
            self._console.say(f"rank {who} left the job early", Colour.FAILURE)
            return
        others = f"; stopping the other {self._bystanders}" if self._bystanders else ""
        where = "" if self._all_local else f" on {failure.host}"
        self._console.say(
            f"rank {failure.rank}{where} failed: {failure.describe()}{others}", Colour.FAILURE
        )

    def lost(self, agent: HostAgent, code: int) -> None:
        if agent.hello is None and not self._supervisor.stopping:
            said = agent.explain_end(code)
            self._unreachable[agent.name] = f"\n{said}" if "\n" in said else said
            if len(self._unreachable) == 1:
                self._supervisor.call_later(_COMPANY_WINDOW, self._give_up_hosts)
            self._connect_if_complete()
            return
        ranks = [slot.rank for slot in self._hosts[agent.name] if slot.rank in self._running]
        self._running -= set(ranks)
        if not agent.remote:
            signal_groups([self._pids[rank] for rank in ranks], signal.SIGKILL)
            said = f":\n{agent.last_words}" if agent.last_words else ""
            self._problem(
                f"the process that watches over the workers (pid {agent.pid}) died; the workers "
                f"were killed{said}"
            )
        elif not self._supervisor.stopping and not self._supervisor.signals:
            how = f"lost: {agent.link.describe_end(code)}"
            self.outcome.lost = LostHost(
                agent.name,
                ranks or [slot.rank for slot in self._hosts[agent.name]],
                how,
                agent.last_words,
            )
            who = format_ranks(self.outcome.lost.ranks)
            self._console.say(
                f"{agent.name} (rank {who}) {how}; stopping the others",
                Colour.FAILURE,
            )
            self._supervisor.stop(FAILURE_GRACE)

    def _on(self, agent: HostAgent) -> str:
        return "" if self._all_local else f" on {agent.name}"
