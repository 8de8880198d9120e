"""The hosts' ends of the launcher's connections: agents, which start and stop workers.

They are made by the simulation, in place of `horovod.runner.agents.agent`, which forks.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

from horovod.common.generations.decisions import DRIVER_LOST
from tests.simulation.network import Socket
from tests.simulation.processes import Host, Process

if TYPE_CHECKING:
    from tests.simulation.job import Cluster

_KEEPALIVE = 30.0
"""Seconds after which a silent connection between launcher and agent is given up, as ssh does."""


class AgentEnd(Socket):
    """The end of the launcher's connection to a host, where processes are started."""

    def __init__(self, cluster: Cluster, process: Any) -> None:
        super().__init__(process)
        self._cluster = cluster
        self.workers: dict[int, Process] = {}
        self._is_over = False
        self._unread = b""
        process.host.when_lost.append(self._lose_power)

    def _lose_power(self) -> None:
        self._is_over = True
        self.vanish()

    def tell(self, **event: Any) -> None:
        if not self._is_over:
            self._transmit(json.dumps(event).encode() + b"\n")
            if event["kind"] == "exited" and self._is_finishing and not self._alive():
                self._end()

    _is_finishing = False

    def _alive(self) -> list[Process]:
        return [worker for worker in self.workers.values() if not worker.is_gone]

    def _receive(self, data: bytes) -> None:
        super()._receive(data)
        if self.is_closed:
            return
        if self._at_end or self._error is not None:
            self.lose()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, command: dict[str, Any]) -> None:
        host, later = self.process.host, self._cluster.world.later
        if command["kind"] == "start":
            seconds = self._cluster.world.random.uniform(0.1, 3.0)

            def start() -> None:
                if not host.is_down and not self._is_over:
                    self._cluster.start_worker(host, self, command["worker"], command["environ"])

            later(seconds, start)
        elif command["kind"] == "stop":
            self._stop(self.workers.get(command["worker"]), command["grace"])
        else:
            self._is_finishing = True
            for worker in self._alive():
                self._stop(worker, command["grace"])
            if not self._alive():
                self._end()

    def _stop(self, worker: Process | None, grace: float) -> None:
        if worker is not None and not worker.is_gone:
            worker.signal(signal.SIGTERM if grace > 0 else signal.SIGKILL)
            self._cluster.world.later(grace, lambda: worker.signal(signal.SIGKILL))

    def _end(self) -> None:
        self._is_over = True
        self.close()

    def lose(self) -> None:
        """Without the launcher there are no workers."""
        if not self._is_over:
            self._is_over = True
            for worker in self._alive():
                worker.signal(signal.SIGKILL)


class _Kernel:
    """Owns the sockets of agents, which are no processes of the simulation."""

    is_gone = False

    def __init__(self, host: Host) -> None:
        self.host = host
        self.world = host.network.world
        self.descriptors: dict[int, Socket] = {}

    def new_descriptor(self, sock: Socket) -> int:
        return -1

    def __str__(self) -> str:
        return f"the agent on {self.host.name}"


class Tools:
    """What every simulated program may ask for."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.plan = cluster.plan
        self.disk = cluster.disk
        self.process: Any = None

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


class DriverTools(Tools):
    """What the launcher's program asks for."""

    def connect_agent(self, name: str) -> Socket:
        """Open a connection to a host, which is there at once and works when the host does."""
        cluster = self._cluster
        host = cluster.hosts[name]
        ours, theirs = Socket(self.process), AgentEnd(cluster, _Kernel(host))
        ours.peer, theirs.peer = theirs, ours
        ours.of_agent = theirs.of_agent = True
        ours.setblocking(False)
        if not host.is_down:
            theirs.tell(kind="hello")
        self._keep_alive(ours, theirs, host)
        return ours

    def _keep_alive(self, ours: Socket, theirs: AgentEnd, host: Host) -> None:
        """Break a connection on which nothing could travel for a while."""
        cluster, head = self._cluster, self.process.host
        silent = 0.0

        def look() -> None:
            nonlocal silent
            if ours.is_closed:
                cluster.world.later(_KEEPALIVE, theirs.lose)  # it may never hear of that
                return
            network = cluster.network
            pairs = (host, head), (head, host)
            is_cut = any(network.is_cut(*pair, of_agent=True) for pair in pairs)
            silent = silent + 5.0 if is_cut or host.is_down or theirs.is_closed else 0.0
            if silent >= _KEEPALIVE:
                ours._error = ConnectionResetError("no answer")
                ours._wake()
                cluster.world.later(0.0, theirs.lose)
                return
            cluster.world.later(5.0, look)

        cluster.world.later(5.0, look)

    def discover(self) -> dict[str, int]:
        return self._cluster.discover()

    def take_event(self, event: str, details: dict[str, Any]) -> None:
        """Take what the driver writes to its status file."""
        facts = ", ".join(f"{name} {value}" for name, value in details.items())
        self.note(f"{event}: {facts}")
        self._cluster.take_event(event, details)

    def ended(self, status: int, problem: str) -> None:
        self._cluster.status, self._cluster.ending = status, problem
