"""The hosts of a job with an agent on each: those of horovodrun and horovod.run, and Spark tasks.

A policy says which hosts it wants, and starts workers on hosts whose agent has answered and has
found out how to reach the job's store. A host that cannot be reached, or is lost, rests for a while
before it is tried again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.common.joining.addresses import LOOPBACK
from horovod.common.topology import Slot
from horovod.observe.reports.amounts import count_of
from horovod.runner.agents.controller import HostSet, JobController, assignment_variables
from horovod.runner.agents.host_agent import HostAgent, WorkerSpec, start_agent, start_command
from horovod.runner.agents.probe import interface_address
from horovod.runner.agents.starters import SSH, Starter
from horovod.runner.agents.store_endpoints import Endpoint, describe_own_problem, describe_problem
from horovod.runner.agents.supervise import raise_descriptor_limit
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import is_local
from horovod.runner.slots.worker_env import (
    KEY,
    WorkerRendezvous,
    common_variables,
    interface_variables,
    memory_variables,
    threads_per_worker,
    travelling_variables,
)

_SLACK = 3.0  # seconds beyond ssh's own time limit, so that ssh can say what is wrong
_WORKERS_PER_HOST = 64  # each needs descriptors, and may be started at any time


@dataclass(frozen=True)
class WorkerRequest:
    """Describes what the workers of a job run, and how they are started."""

    command: Sequence[str]
    env: Mapping[str, str]  # the variables that do not depend on worker and host
    cwd: str
    starter: Starter = SSH  # for hosts that are other machines
    nics: Sequence[str] = ()
    start_timeout: float = 30.0
    cpu_bind: str = "none"
    verbose: int = 0  # how often --verbose was given

    def cpu_share(self, index: int, count: int) -> tuple[str, int, int] | None:
        """Return which share of its host's cores a worker is bound to: see `WorkerSpec`."""
        return None if self.cpu_bind == "none" else (self.cpu_bind, index, count)


@dataclass
class _Host:
    """A host that is wanted."""

    agent: HostAgent
    is_probed: bool = False  # it was asked how it reaches the store, and has not answered
    endpoint: Endpoint | None = None  # how it reaches the store, once that is known
    nics: Sequence[str] = ()  # interfaces for traffic between ranks; empty stands for all
    entrance: Endpoint | None = None  # its address for other hosts, with a free port


class AgentSet(HostSet):
    """The agents of all hosts that are wanted."""

    def __init__(
        self,
        request: WorkerRequest,
        job: JobController,
        connect: Callable[[str], HostAgent] | None = None,
        *,
        together: bool = False,
    ) -> None:
        """Prepare for hosts.

        Args:
            request: What the workers run.
            job: The job.
            connect: Returns the agent of a host; by default it starts one.
            together: Whether the job needs all hosts, and wants them at once. They are then asked
                how they reach the store only when all have answered, because each also says at
                which address the others reach it.
        """
        super().__init__()
        self._request = request
        self._connect = connect or self._start_agent
        self._endpoints = job.endpoints
        self._supervisor = job.supervisor
        self._console = job.console
        self._together = together
        self._hosts: dict[str, _Host] = {}
        self._said: set[tuple[int, int, int]] = set()

    # -- which hosts -----------------------------------------------------------------------

    def want(self, names: Sequence[str]) -> dict[str, LaunchError]:
        problems = {}
        # This machine comes first: its workers keep the user's limit of descriptors.
        for name in sorted(names, key=lambda name: not is_local(name)):
            if name in self._hosts or self._rests_now(name):
                continue
            try:
                agent = self._connect(name)
            except (LaunchError, ValueError, OSError) as error:
                self.rest(name)
                why = f"cannot start on {name}: {error}"
                problems[name] = LaunchError(why, getattr(error, "status", 1))
                continue
            self._hosts[name] = _Host(agent)
            self._supervisor.add(agent)
            if agent.remote:
                seconds = self._request.start_timeout + _SLACK
                self._supervisor.call_later(seconds, lambda a=agent: self._give_up(a))  # type: ignore[misc]
        return problems

    def _start_agent(self, name: str) -> HostAgent:
        if not is_local(name):
            raise_descriptor_limit((3 + 4 * _WORKERS_PER_HOST) * (len(self._hosts) + 1) + 128)
        agent = start_agent(name, self._request.starter)
        if self._request.verbose > 1:
            self._console.say(f"{name}: {shlex.join(start_command(name, self._request.starter))}")
        return agent

    def _give_up(self, agent: HostAgent) -> None:
        if agent.hello is None:  # after `give_up` the loop reports it as lost
            agent.give_up(f"no answer within {self._request.start_timeout:g} s")

    def let_go(self, name: str) -> None:
        if name in self._hosts:
            self._hosts.pop(name).agent.dismiss()

    def names(self) -> list[str]:
        return list(self._hosts)

    def is_ready(self, name: str) -> bool:
        return name in self._hosts and self._hosts[name].endpoint is not None

    def is_connecting(self, name: str) -> bool:
        host = self._hosts.get(name)
        if host is None or host.endpoint is not None:
            return False
        return host.is_probed or host.agent.hello is None

    def agent(self, name: str) -> HostAgent | None:
        return self._hosts[name].agent if name in self._hosts else None

    # -- the way to the store --------------------------------------------------------------

    def met(self, agent: HostAgent) -> LaunchError | None:
        host = self._of(agent)
        if host is None:
            return None
        if self._request.verbose:
            self._console.say(f"{agent.name}: agent runs as pid {(agent.hello or {})['pid']}")
        hosts = list(self._hosts.values()) if self._together else [host]
        if any(each.agent.hello is None for each in hosts):
            return None
        return self._probe(hosts)

    def _probe(self, hosts: Sequence[_Host]) -> LaunchError | None:
        """Let hosts find their ways to the store; those of this machine alone know theirs."""
        nics = self._request.nics
        problem = describe_own_problem(nics)
        if problem:
            return LaunchError(problem, status=2)
        if not any(host.agent.remote for host in hosts):
            for host in hosts:
                host.endpoint = self._endpoints.open(LOOPBACK)
                host.nics = [name for name in nics if interface_address(name)]
            return None
        agents = [host.agent for host in hosts]
        problem = self._endpoints.probe_all(agents, nics, self._request.start_timeout)
        for host in hosts:
            host.is_probed = not problem
        return LaunchError(problem) if problem else None

    def probed(self, agent: HostAgent, answer: Mapping[str, Any]) -> LaunchError | None:
        host = self._of(agent)
        if host is None:
            return None
        host.is_probed = False
        if self._request.verbose > 1 and answer["endpoint"] is not None:
            address, port = answer["endpoint"]
            self._console.say(
                f"{agent.name}: reaches this machine at {address}, port {port}, and is reached by "
                f"other hosts at {answer['address']}"
            )
        problem = describe_problem(answer, self._request.nics)
        if problem:
            return LaunchError(f"{agent.name} {problem}", status=2 if answer["endpoint"] else 1)
        host.endpoint = answer["endpoint"][0], answer["endpoint"][1]
        host.nics = list(answer["nics"])
        host.entrance = answer["address"], answer["port"]
        endpoints = [each.endpoint for each in self._hosts.values() if each.endpoint]
        if self._together and len(endpoints) == len(self._hosts):
            self._endpoints.keep(endpoints)
        return None

    def entrance(self, name: str) -> Endpoint:
        """Return the address at which the other hosts reach a ready host, and a port free there."""
        host = self._hosts[name]
        if host.entrance is None:
            return LOOPBACK, self._endpoints.reserve_port(LOOPBACK)
        address, port = host.entrance
        return LOOPBACK if len(self._hosts) == 1 else address, port

    def lost(self, agent: HostAgent) -> bool:
        if self._of(agent) is None:
            return False
        del self._hosts[agent.name]
        self.rest(agent.name)
        return True

    def _of(self, agent: HostAgent) -> _Host | None:
        return self._hosts.get(agent.name) if self.agent(agent.name) is agent else None

    # -- workers ---------------------------------------------------------------------------

    def environment(self, name: str, workers: int) -> dict[str, str]:
        """Return the variables of all workers of a ready host; `workers` share its cores."""
        host = self._hosts[name]
        assert host.endpoint is not None, "only ready hosts get workers"
        rendezvous = WorkerRendezvous(*host.endpoint, self._endpoints.key)
        return host_variables(self._request, host.agent, rendezvous, host.nics, workers)

    def start(self, name: str, worker: int, index: int, slots: int, slot: Slot | None) -> None:
        agent, request = self._hosts[name].agent, self._request
        self._say_threads(agent, slots)
        own = {
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_WORKER_ID": f"w{worker}",
            "HOROVOD_HOSTNAME": name,
            **assignment_variables(slot),
        }
        bind = request.cpu_share(index, slots)
        spec = WorkerSpec(worker, request.command, own, request.cwd, bind)
        agent.start([spec], self.environment(name, slots))

    def stop(self, name: str, worker: int, grace: float) -> None:
        agent = self.agent(name)
        if agent is not None:
            agent.stop(grace, [worker])

    def obeys(self, name: str) -> bool:
        agent = self.agent(name)
        return agent is not None and not agent.remote

    def _say_threads(self, agent: HostAgent, slots: int) -> None:
        request, cores = self._request, agent.cores
        threads = threads_per_worker(cores, slots)
        is_ours = agent.link.own_variables is not None and not request.env.get("OMP_NUM_THREADS")
        if is_ours and request.verbose and (threads, cores, slots) not in self._said:
            self._said.add((threads, cores, slots))
            self._console.say(
                f"OMP_NUM_THREADS={threads} for each worker on {agent.name} ({cores} cores, "
                f"{count_of(slots, 'slot')}); set it yourself to choose otherwise"
            )


def host_variables(
    request: WorkerRequest,
    agent: HostAgent,
    rendezvous: WorkerRendezvous,
    nics: Sequence[str],
    workers: int,
) -> dict[str, str]:
    """Return the variables that are the same for all workers of a host.

    Args:
        request: What the workers run.
        agent: The agent of the host.
        rendezvous: The addresses with which the ranks find each other.
        nics: The network interfaces of the host for the traffic between ranks; any if empty.
        workers: The number of workers that share the cores of the host.
    """
    own_variables = agent.link.own_variables
    env = travelling_variables(request.env, own_variables) if agent.remote else dict(request.env)
    if own_variables is not None:  # otherwise the cluster that offers the host decides on these
        if not request.env.get("OMP_NUM_THREADS"):
            env["OMP_NUM_THREADS"] = str(threads_per_worker(agent.cores, workers))
        env |= memory_variables((agent.hello or {})["machine"], env)
    env |= interface_variables(nics) | common_variables(rendezvous)
    if own_variables is None:
        del env[KEY]
    return env
