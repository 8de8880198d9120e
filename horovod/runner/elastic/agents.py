"""The hosts of an elastic job of horovodrun or Spark, with an agent on each.

`driver` says which hosts it wants, and starts workers on hosts whose agent is ready and has found
out how to reach the store. A host that cannot be reached, or is lost, rests for a while before it
is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.common.addresses import LOOPBACK
from horovod.common.topology import Slot
from horovod.common.wire import encode_key
from horovod.runner.agents.host_agent import HostAgent, WorkerSpec, start_agent
from horovod.runner.agents.probe import interface_address
from horovod.runner.agents.starters import SSH, Starter
from horovod.runner.agents.store_endpoints import Endpoint, StoreEndpoints, describe_problem
from horovod.runner.agents.supervise import Supervisor, raise_descriptor_limit
from horovod.runner.elastic.host_set import HostSet, assignment_variables
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import is_local
from horovod.runner.slots.worker_env import (
    KEY,
    interface_variables,
    memory_variables,
    threads_per_worker,
    travelling_variables,
)

_SLACK = 5.0  # seconds beyond ssh's own time limit, so that ssh can say what is wrong
_WORKERS_PER_HOST = 64  # each needs descriptors, and may be started at any time


@dataclass(frozen=True)
class WorkerRequest:
    """What the workers run, and how they are started."""

    command: Sequence[str]
    env: Mapping[str, str]  # the variables that do not depend on worker and host
    cwd: str
    starter: Starter = SSH  # for hosts that are other machines
    nics: Sequence[str] = ()
    start_timeout: float = 30.0
    cpu_bind: str = "none"
    verbose: int = 0


class _Host:
    """A host that the driver wants."""

    def __init__(self, agent: HostAgent) -> None:
        self.agent = agent
        self.endpoint: Endpoint | None = None  # how it reaches the store, once that is known
        self.nics: Sequence[str] = ()


class Agents(HostSet):
    """The agents of all hosts that the driver wants."""

    def __init__(
        self,
        request: WorkerRequest,
        endpoints: StoreEndpoints,
        supervisor: Supervisor,
        connect: Callable[[str], HostAgent] | None = None,
    ) -> None:
        """Prepare for hosts.

        Args:
            request: What the workers run.
            endpoints: The job's store.
            supervisor: The launcher's loop.
            connect: Returns the agent of a host; by default it starts one.
        """
        super().__init__()
        self._request = request
        self._connect = connect or self._start_agent
        self._endpoints = endpoints
        self._supervisor = supervisor
        self._hosts: dict[str, _Host] = {}
        self._said: set[tuple[int, int, int]] = set()

    # -- which hosts -----------------------------------------------------------------------

    def want(self, names: Sequence[str]) -> dict[str, str]:
        problems = {}
        for name in names:
            if name in self._hosts or self._rests_now(name):
                continue
            try:
                agent = self._connect(name)
            except (LaunchError, ValueError, OSError) as error:
                self.rest(name)
                problems[name] = str(error)
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
        return start_agent(name, self._request.starter)

    def let_go(self, name: str) -> None:
        host = self._hosts.pop(name, None)
        if host is None:
            return
        if host.agent.hello is None and host.agent.remote:
            host.agent.abandon()
        else:
            host.agent.finish()

    def names(self) -> list[str]:
        return list(self._hosts)

    def is_ready(self, name: str) -> bool:
        return name in self._hosts and self._hosts[name].endpoint is not None

    def is_connecting(self, name: str) -> bool:
        return name in self._hosts and self._hosts[name].endpoint is None

    def agent(self, name: str) -> HostAgent | None:
        host = self._hosts.get(name)
        return None if host is None else host.agent

    def _give_up(self, agent: HostAgent) -> None:
        if agent.hello is None:
            agent.abandon()  # the loop then reports it as lost

    # -- what agents say -------------------------------------------------------------------

    def met(self, agent: HostAgent) -> str:
        host = self._of(agent)
        if host is None:
            return ""
        if not agent.remote:
            host.endpoint = self._endpoints.open(LOOPBACK)
            host.nics = [name for name in self._request.nics if interface_address(name)]
            return ""
        problem = self._endpoints.open_towards([agent], self._request.nics)
        if not problem:
            self._endpoints.probe(agent, self._request.nics, [], self._request.start_timeout)
        return problem

    def probed(self, agent: HostAgent, answer: Mapping[str, Any]) -> str:
        host = self._of(agent)
        if host is None:
            return ""
        problem = describe_problem(agent.name, answer, self._request.nics)
        if problem:
            return problem
        host.endpoint = answer["endpoint"][0], answer["endpoint"][1]
        host.nics = list(answer["nics"])
        return ""

    def lost(self, agent: HostAgent) -> bool:
        if self._of(agent) is None:
            return False
        del self._hosts[agent.name]
        self.rest(agent.name)
        return True

    def _of(self, agent: HostAgent) -> _Host | None:
        host = self._hosts.get(agent.name)
        return host if host is not None and host.agent is agent else None

    # -- workers ---------------------------------------------------------------------------

    def start(
        self, name: str, worker: int, index: int, slots: int, assignment: Slot | None
    ) -> None:
        host, request = self._hosts[name], self._request
        assert host.endpoint is not None, "only ready hosts get workers"
        own_variables = host.agent.link.own_variables
        env = (
            travelling_variables(request.env, own_variables)
            if host.agent.remote
            else dict(request.env)
        )
        if own_variables is not None:
            if not request.env.get("OMP_NUM_THREADS"):
                env["OMP_NUM_THREADS"] = str(self._threads(host.agent, slots))
            env |= memory_variables((host.agent.hello or {})["machine"], env)
        env |= interface_variables(host.nics)
        own = {
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_WORKER_ID": f"w{worker}",
            "HOROVOD_HOSTNAME": name,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host.endpoint[0],
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(host.endpoint[1]),
            "PYTHONUNBUFFERED": "1",
        }
        own |= assignment_variables(assignment)
        if own_variables is not None:
            own[KEY] = encode_key(self._endpoints.key)
        bind = None if request.cpu_bind == "none" else (request.cpu_bind, index, slots)
        spec = WorkerSpec(worker, request.command, own, request.cwd, bind)
        host.agent.start([spec], env)

    def stop(self, name: str, worker: int, grace: float) -> None:
        agent = self.agent(name)
        if agent is not None:
            agent.stop(grace, [worker])

    def obeys(self, name: str) -> bool:
        agent = self.agent(name)
        return agent is not None and not agent.remote

    def _threads(self, agent: HostAgent, slots: int) -> int:
        cores = (agent.hello or {})["cores"]
        threads = threads_per_worker(cores, slots)
        if self._request.verbose and (threads, cores, slots) not in self._said:
            self._said.add((threads, cores, slots))
            self._supervisor.console.say(
                f"OMP_NUM_THREADS={threads} for each worker on {agent.name} ({cores} cores, "
                f"{slots} slot{'' if slots == 1 else 's'}); set it yourself to choose otherwise"
            )
        return threads
