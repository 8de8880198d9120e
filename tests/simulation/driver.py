"""The launcher of a simulated job: the real driver, its loop and the job's store.

What is not real is how processes start on hosts: an agent of the simulation does it, at the other
end of a simulated connection, in place of `horovod.runner.agents.agent`, which forks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import simulated  # what the simulation offers

from horovod.common.generations.membership import WORKER_ID
from horovod.common.joining.launcher_store import SECRET_KEY, STORE_ADDRESS, STORE_PORT
from horovod.common.topology import Slot
from horovod.common.wire import encode_key
from horovod.runner.agents.controller import JobController
from horovod.runner.agents.host_set import HostSet
from horovod.runner.agents.supervise import FAILURE_GRACE
from horovod.runner.elastic.discovery import HostDiscovery, HostManager
from horovod.runner.elastic.driver import Driver
from horovod.runner.elastic.job_state import Limits
from horovod.runner.output.console import Console
from horovod.runner.output.report import LaunchError, exit_status
from horovod.runner.output.watcher import JobWatcher, Status

_START_SECONDS = 30.0


class Agent:
    """The connection to a host, as the driver's failures ask about it."""

    remote = True
    finished = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.hello: dict[str, Any] | None = None
        self.connection: Any = None
        self.unread = b""

    def explain_end(self, code: int) -> str:
        return "connection closed"


class Hosts(HostSet):
    """The hosts that are wanted, and the agents on them."""

    def __init__(self, job: JobController) -> None:
        super().__init__()
        self._job = job
        self._endpoints = job.endpoints
        self._supervisor = job.supervisor
        self._agents: dict[str, Agent] = {}

    def want(self, names: Sequence[str]) -> dict[str, LaunchError]:
        for name in names:
            if name not in self._agents and not self._rests_now(name):
                agent = self._agents[name] = Agent(name)
                agent.connection = simulated.connect_agent(name)
                self._supervisor.watch(
                    agent.connection.fileno(),
                    lambda agent=agent: self._take(agent),  # type: ignore[misc]
                )
                self._supervisor.call_later(
                    _START_SECONDS,
                    lambda agent=agent: self._give_up(agent),  # type: ignore[misc]
                )
        return {}

    def _give_up(self, agent: Agent) -> None:
        if agent.hello is None and self._agents.get(agent.name) is agent:
            self._end(agent)

    def _take(self, agent: Agent) -> None:
        try:
            data = agent.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._end(agent)
            return
        *lines, agent.unread = (agent.unread + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["kind"] == "hello":
                agent.hello = event
                self._job.ready(agent)
            elif event["kind"] == "started":
                self._job.started(agent, event["worker"], event["pid"])
            elif event["kind"] == "exited":
                self._job.exited(agent, [(event["worker"], event["code"])])

    def _end(self, agent: Agent) -> None:
        if agent.connection.fileno() >= 0:
            self._supervisor.unwatch(agent.connection.fileno())
            agent.connection.close()
            self._job.lost(agent, 255)  # type: ignore[arg-type]

    def lost(self, host: Agent) -> bool:
        if self._agents.get(host.name) is not host:
            return False
        del self._agents[host.name]
        self.rest(host.name)
        return True

    def let_go(self, name: str) -> None:
        agent = self._agents.pop(name, None)
        if agent is not None and agent.connection.fileno() >= 0:
            self._supervisor.unwatch(agent.connection.fileno())
            agent.connection.close()

    def names(self) -> list[str]:
        return list(self._agents)

    def is_ready(self, name: str) -> bool:
        return name in self._agents and self._agents[name].hello is not None

    def is_connecting(self, name: str) -> bool:
        return name in self._agents and self._agents[name].hello is None

    def met(self, host: Agent) -> None:
        return None

    def obeys(self, name: str) -> bool:
        return self.is_ready(name)

    def start(self, name: str, worker: int, index: int, slots: int, place: Slot | None) -> None:
        ((address, port),) = self._endpoints.endpoints
        environ = {
            WORKER_ID: f"w{worker}",
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_HOSTNAME": name,
            "HOROVOD_CPU_OPERATIONS": "gloo",  # TCP also inside of hosts
            "HOROVOD_KEEP_HEAP": "0",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(simulated.plan.stall_shutdown),
            STORE_ADDRESS: address,
            STORE_PORT: str(port),
            SECRET_KEY: encode_key(self._endpoints.key),
        }
        self._tell(name, kind="start", worker=worker, environ=environ)

    def stop(self, name: str, worker: int, grace: float) -> None:
        self._tell(name, kind="stop", worker=worker, grace=grace)

    def _tell(self, name: str, **command: Any) -> None:
        agent = self._agents.get(name)
        if agent is not None:
            try:
                agent.connection.send(json.dumps(command).encode() + b"\n")
            except OSError:
                pass  # the loop learns of it when it reads

    def close(self) -> None:
        """End all workers and agents, as the launcher's loop does."""
        for agent in self._agents.values():
            try:
                agent.connection.send(b'{"kind": "finish", "grace": %g}\n' % FAILURE_GRACE)
                agent.connection.settimeout(60.0)
                while agent.connection.recv(1 << 16):
                    pass
            except OSError:
                continue  # lost: its workers end by themselves


class Discovery(HostDiscovery):
    """The hosts that the simulation offers."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return simulated.discover()


class Events(JobWatcher):
    """The events of the job, which are part of the story."""

    def note(self, event: str, **details: Any) -> None:
        simulated.take_event(event, details)


def main() -> None:
    """Run the job to its end."""
    plan = simulated.plan
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        console = Console(nowhere, nowhere)
        job = JobController(console)
        job.endpoints.open("head")
        hosts = Hosts(job)
        limits = Limits(
            num_proc=plan.num_proc,
            min_np=plan.min_np,
            max_np=plan.max_np,
            elastic_timeout=plan.elastic_timeout,
        )
        manager = HostManager(Discovery(), max_failures=1000)
        status = Status(console, watcher=Events())
        outcome = job.run(hosts, Driver(job, hosts, limits, manager, status))
        hosts.close()
        job.close()
        simulated.ended(exit_status(outcome), outcome.problem)
    finally:
        os.close(nowhere)
