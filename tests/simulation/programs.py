"""The programs that run on simulated hosts, and what each may ask of the simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from horovod.common.generations.decisions import DRIVER_LOST
from tests.simulation.modules import Library
from tests.simulation.pipes import File
from tests.simulation.processes import Host, Process

if TYPE_CHECKING:
    from tests.simulation.job import Cluster


def start_program(
    cluster: Cluster,
    host: Host,
    command: list[str],
    environ: Mapping[str, str],
    parent: Process | None,
    files: Mapping[int, File],
) -> Process:
    """Start Python: with `-m` a worker's module, with `-c` an agent's program."""
    world = cluster.world
    if "-m" not in command:
        text = command[command.index("-c") + 1]
        tools: Tools = AgentTools(cluster)
        name = f"agent of {host.name}"
        agent = Process(host, name, lambda it: it.run(text), environ, tools, parent, files)
        tools.process, agent.command = agent, command
        return agent
    module = command[command.index("-m") + 1]
    seconds = world.random.uniform(0.1, 3.0)

    def run(modules: Library) -> None:
        world.park("Python to start", seconds)
        modules.load(module).main()

    tools = cluster.make_tools(environ)
    worker = Process(host, tools.name, run, environ, tools, parent, files)
    tools.process, worker.command = worker, command
    cluster.workers[worker.name] = worker
    return worker


class Tools:
    """What every simulated program may ask for."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.plan = cluster.plan
        self.disk = cluster.disk
        self.process: Any = None
        self.name = ""  # of a worker

    def note(self, text: str) -> None:
        if self.disk is not None:
            text = text.replace(str(self.disk.path), "disk")
        self._cluster.world.note(f"{self.process.name if self.process else '?'}: {text}")

    def check_error(self, error: BaseException) -> None:
        """Check that an error ends a program, which has no mistakes, only where trying is over."""
        membership = self._cluster.world.modules.load("horovod.common.generations.membership")
        mine = membership._membership
        gave_up = mine is not None and mine.unrecoverable is not None
        if type(error).__name__ != "HorovodInternalError" or not gave_up:
            what = f"{type(error).__name__}: {error}"
            self._cluster.breach(f"{self.process}: an error that nobody caught: {what}")

    def check_status(self, code: int) -> None:
        """Check that no program, which has no mistakes, ends with a status that blames it."""
        if code not in (0, DRIVER_LOST):
            self._cluster.breach(f"{self.process} ended itself with status {code}")

    def jitter(self) -> float:
        return self._cluster.world.random.uniform(0.5, 1.5)


class AgentTools(Tools):
    """What the simulation asks about the end of an agent."""

    def check_error(self, error: BaseException) -> None:
        self._cluster.breach(f"{self.process}: {type(error).__name__}: {error}")

    def check_status(self, code: int) -> None:
        """An agent may end with any status: its launcher knows what that means."""


class DriverTools(Tools):
    """What the launcher's program asks for."""

    def discover(self) -> dict[str, int]:
        return self._cluster.discover()

    def take_event(self, event: str, details: dict[str, Any]) -> None:
        """Take what the driver writes to its status file."""
        facts = ", ".join(f"{name} {value}" for name, value in details.items())
        self.note(f"{event}: {facts}")
        self._cluster.take_event(event, details)

    def blames(self, ranks: list[int], missing: list[str]) -> None:
        """Learn which ranks the launcher takes for the cause, and rows that its table lacks."""
        self._cluster.blamed = ranks
        if missing:
            self._cluster.breach(f"the account has no rows {missing}")

    def ended(self, status: int, problem: str) -> None:
        self._cluster.status, self._cluster.ending = status, problem
