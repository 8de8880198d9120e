"""One simulated job: made from a seed, run to its end, and checked while it runs.

`Plan.from_seed` draws a cluster, a training and faults; `simulate` runs it and returns a `Result`.
What is checked, after every event that it speaks of:

- ranks that take part in a collective get the same values, and are at the same step of the same
  model;
- a worker never goes back behind a commit that was announced to it;
- no generation has fewer workers than the minimum;
- nobody commits in a generation when a newer one has committed;
- all workers that finish have taken every step exactly once;
- the job ends well within `Plan.patience` seconds after the last fault is over, and leaves no
  process behind.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.network import Network, Socket
from tests.simulation.processes import Host, Process
from tests.simulation.world import World

_HEAD = "head"
_KEEPALIVE = 30.0
"""Seconds after which a silent connection between launcher and agent is given up, as ssh does."""

_LEGITIMATE = (
    "all workers were lost again before they could begin",
    "all workers have left, as they were told to",
)
"""Problems with which a job may end though its hosts work again."""

Patches = Mapping[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, from `start` for some seconds."""

    kind: str
    start: float
    seconds: float
    target: int  # a number of which the worker or host is made

    def __str__(self) -> str:
        return f"{self.kind} of {self.target} at {self.start:.1f} s for {self.seconds:.1f} s"


KINDS = (
    "kill worker",
    "stop worker",
    "tell worker to leave",
    "power loss",
    "cut",
    "cut towards the launcher",
    "cut from the launcher",
    "slow network",
    "discovery fails",
    "host is not offered",
    "clock jumps",
)


@dataclass(frozen=True)
class Plan:
    """A cluster, a training and what goes wrong."""

    seed: int
    num_hosts: int
    slots: int
    min_np: int
    steps: int
    pace: float
    commit_every: int
    faults: tuple[Fault, ...]
    elastic_timeout: float = 600.0

    @property
    def num_proc(self) -> int:
        return self.num_hosts * self.slots

    @property
    def max_np(self) -> int:
        return self.num_hosts * self.slots

    @property
    def faults_end(self) -> float:
        return max((fault.start + fault.seconds for fault in self.faults), default=0.0)

    @property
    def patience(self) -> float:
        """Virtual seconds from the last fault's end to the job's."""
        return 1800.0 + self.steps * self.pace * 4

    @classmethod
    def from_seed(cls, seed: int, num_hosts: int = 0, num_faults: int = -1) -> Plan:
        """Draw a job. Faults are drawn apart from the scheduling, so that some can be left out."""
        draw = random.Random(f"plan {seed}")
        hosts = num_hosts or draw.randint(1, 4)
        slots = draw.randint(1, 2)
        steps, pace = draw.randint(10, 60), draw.choice([0.05, 0.5, 2.0])
        length = steps * pace + 10.0
        count = draw.randint(0, 10) if num_faults < 0 else num_faults
        faults = sorted(
            (
                Fault(
                    draw.choice(KINDS),
                    draw.uniform(0.0, 1.5 * length),
                    draw.choice([0.5, 5.0, 20.0, 45.0, 90.0]) * draw.uniform(0.5, 1.5),
                    draw.randrange(1000),
                )
                for _ in range(count)
            ),
            key=lambda fault: fault.start,
        )
        return cls(
            seed,
            hosts,
            slots,
            draw.randint(1, hosts * slots),
            steps,
            pace,
            draw.randint(1, 5),
            tuple(faults),
        )


@dataclass
class Result:
    """What came of a job."""

    plan: Plan
    problem: str = ""  # a broken promise; empty if all were kept
    status: int | None = None
    ending: str = ""
    seconds: float = 0.0  # virtual
    generations: int = 0
    events: list[tuple[float, str]] = field(default_factory=list)

    def story(self, most: int = 60) -> str:
        """Tell the last events in words."""
        lines = [f"{when - 1000.0:9.3f} s  {text}" for when, text in self.events[-most:]]
        faults = "\n".join(f"  {fault}" for fault in self.plan.faults) or "  none"
        head = (
            f"seed {self.plan.seed}: {self.plan.num_hosts} hosts with {self.plan.slots} slots, at "
            f"least {self.plan.min_np} workers, {self.plan.steps} steps of {self.plan.pace} s\n"
            f"faults:\n{faults}"
        )
        return "\n".join([head, *lines, self.problem or "all promises were kept"])

    def fingerprint(self) -> str:
        """Return a digest of all events: equal for two runs of one seed."""
        text = json.dumps([[f"{when:.6f}", what] for when, what in self.events])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Broken(Exception):
    """A promise does not hold."""


def digest(model: str, step: int) -> str:
    return hashlib.sha256(f"{model}{step}".encode()).hexdigest()[:12]


class Cluster:
    """The job while it runs: hosts, what the driver and the workers are told, the checks."""

    def __init__(self, plan: Plan, patches: Patches) -> None:
        self.plan = plan
        self.world = World(plan.seed)
        self.network = Network(self.world)
        self.hosts: dict[str, Host] = {}
        self.broken = ""
        self.status: int | None = None
        self.ending = ""
        self.workers: dict[str, Process] = {}
        self._patches = patches
        self._offered = {f"h{number}": plan.slots for number in range(plan.num_hosts)}
        self._hidden: dict[str, float] = {}  # hosts that are not offered, until when
        self._discovery_fails_until = 0.0
        self._values: dict[tuple[str, int], Any] = {}
        self._newest_commit = 0  # the newest decision in whose generation something was committed
        self.commits: dict[str, int] = {}  # the last announced step, by worker
        self.formed: set[int] = set()
        self.finished: dict[str, tuple[int, str]] = {}
        for name in (_HEAD, *self._offered):
            Host(name, self.network, self.hosts)
        for fault in plan.faults:
            self.world.later(fault.start, lambda fault=fault: self._begin(fault))  # type: ignore[misc]

    def run(self) -> Result:
        """Run to the end, and until nothing is left."""
        result = Result(self.plan, events=self.world.events)
        tools = DriverTools(self)
        driver = Process(
            self.hosts[_HEAD],
            "horovodrun",
            "tests.simulation.driver",
            {},
            tools=tools,
            patches=self._patches,
        )
        tools.process = driver
        try:
            limit = self.plan.faults_end + self.plan.patience
            self.world.run(lambda: bool(self.broken) or driver.is_gone, limit)
            if not self.broken:
                self._check_end(driver)
        finally:
            result.problem = self.broken
            result.status, result.ending = self.status, self.ending
            result.seconds = self.world.now - 1000.0
            result.generations = len(self.formed)
            self.world.close()
        return result

    def _check_end(self, driver: Process) -> None:
        if not driver.is_gone:
            waits = {
                str(process): [
                    f"{task.name}: {task.waiting_for}"
                    for task in self.world._tasks
                    if task.process is process and not task.is_done
                ]
                for host in self.hosts.values()
                for process in host.processes
            }
            self.breach(
                f"the job has not ended {self.plan.patience:g} s after the last fault: {waits}"
            )
            return
        if driver.code != 0:
            self.breach(f"the launcher ended with code {driver.code}")
        elif self.status != 0 and not self.ending.startswith(_LEGITIMATE):
            self.breach(f"the job failed with status {self.status}: {self.ending!r}")
        for name, (step, model) in self.finished.items():
            wanted = ""
            for number in range(self.plan.steps):
                wanted = digest(wanted, number)
            if (step, model) != (self.plan.steps, wanted):
                self.breach(f"{name} finished with step {step} and another model")
        if self.status == 0 and not self.finished:
            self.breach("the job ended well though nobody has finished")
        self.world.run(lambda: not any(p for p in self._left()), 180.0)
        if self._left():
            self.breach(f"left behind: {', '.join(map(str, self._left()))}")

    def _left(self) -> list[Process]:
        return [process for host in self.hosts.values() for process in host.processes]

    def breach(self, problem: str) -> None:
        """Note that a promise does not hold."""
        self.broken = self.broken or problem
        self.world.note(f"BROKEN: {problem}")

    # -- faults -------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> None:
        names = sorted(self._offered)
        host = names[fault.target % len(names)]
        alive = [name for name in sorted(self.workers) if not self.workers[name].is_gone]
        worker = self.workers[alive[fault.target % len(alive)]] if alive else None
        self.world.note(f"fault: {fault}" + (f" ({worker})" if "worker" in fault.kind else host))
        later, network = self.world.later, self.network
        if "worker" in fault.kind:
            if worker is None:
                return
            if fault.kind == "kill worker":
                worker.signal(signal.SIGKILL)
            elif fault.kind == "stop worker":
                worker.signal(signal.SIGSTOP)
                later(fault.seconds, lambda: worker.signal(signal.SIGCONT))
            else:
                worker.signal(signal.SIGTERM)
        elif fault.kind == "power loss":
            self.hosts[host].lose_power()
            later(fault.seconds, self.hosts[host].boot)
        elif fault.kind.startswith("cut"):
            if fault.kind != "cut from the launcher":
                network.cut(host, _HEAD)
            if fault.kind != "cut towards the launcher":
                network.cut(_HEAD, host)
            later(fault.seconds, network.heal)
        elif fault.kind == "slow network":
            network.set_delay(host, 0.3)
            later(fault.seconds, lambda: network.set_delay(host, 0.0))
        elif fault.kind == "discovery fails":
            self._discovery_fails_until = self.world.now + fault.seconds
        elif fault.kind == "host is not offered":
            self._hidden[host] = self.world.now + fault.seconds
        else:
            self.hosts[host].clock_offset += self.world.random.uniform(-3600, 3600)

    def discover(self) -> dict[str, int]:
        """Return the hosts that the cluster offers now."""
        if self.world.now < self._discovery_fails_until:
            raise RuntimeError("the cluster does not answer")
        now = self.world.now
        return {
            host: slots for host, slots in self._offered.items() if self._hidden.get(host, 0) <= now
        }

    # -- processes ----------------------------------------------------------------------------

    def start_worker(self, host: Host, agent: AgentEnd, number: int, environ: Any) -> None:
        tools = WorkerTools(self, f"w{number}")
        worker = Process(
            host,
            f"w{number}",
            "tests.simulation.worker",
            environ,
            lambda code: agent.tell(kind="exited", worker=number, code=code),
            tools,
            self._patches,
        )
        tools.process = worker
        self.workers[worker.name] = worker
        agent.workers[number] = worker
        agent.tell(kind="started", worker=number, pid=worker.pid)

    # -- checks -------------------------------------------------------------------------------

    def check_values(self, generation: str, number: int, values: Any, worker: str) -> None:
        known = self._values.setdefault((generation, number), values)
        if known != values:
            self.breach(f"{worker} got {values} in exchange {number} of {generation}, not {known}")

    def note_commit(self, worker: str, decision: int, version: int, step: int) -> None:
        self.commits[worker] = step
        if decision < self._newest_commit:
            self.breach(
                f"{worker} committed step {step} in decision {decision}, after a commit in "
                f"decision {self._newest_commit}"
            )
        self._newest_commit = max(self._newest_commit, decision)

    def check_begin(self, worker: str, step: int) -> None:
        if step < self.commits.get(worker, 0):
            self.breach(f"{worker} begins at step {step}, behind its commit {self.commits[worker]}")


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
        self._is_over = self.is_closed = True

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
        self.process: Any = None

    def note(self, text: str) -> None:
        self._cluster.world.note(f"{self.process.name if self.process else '?'}: {text}")

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
            is_cut = network.is_cut(host, head) or network.is_cut(head, host)
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

    def ended(self, status: int, problem: str) -> None:
        self._cluster.status, self._cluster.ending = status, problem


class WorkerTools(Tools):
    """What a worker's program asks for, and tells."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster)
        self._name = name
        self._decision = 0

    digest = staticmethod(digest)

    def collective(self, decision: int, generation: str, number: int, values: Any) -> None:
        self._cluster.check_values(generation, number, values, self._name)

    def check_alike(self, ranks: list[Any]) -> None:
        if len({(step, model) for _, step, model in ranks}) > 1:
            self._cluster.breach(f"ranks are at different steps or models: {ranks}")

    def formed(self, decision: int, rank: int, size: int) -> None:
        self.note(f"is rank {rank} of {size} in decision {decision}")
        if size < self.plan.min_np:
            self._cluster.breach(f"{self._name} is one of {size}, fewer than {self.plan.min_np}")
        if decision < self._decision:
            self._cluster.breach(f"{self._name} went back to decision {decision}")
        self._decision = decision
        self._cluster.formed.add(decision)

    def begins(self, version: int, step: int) -> None:
        self.note(f"begins at step {step}")
        self._cluster.check_begin(self._name, step)

    def committed(self, version: int, step: int) -> None:
        self._cluster.note_commit(self._name, self._decision, version, step)

    def finished(self, step: int, model: str) -> None:
        self.note(f"has finished at step {step}")
        self._cluster.finished[self._name] = step, model


def simulate(plan: Plan, patches: Patches | None = None) -> Result:
    """Run a job to its end, and return what came of it."""
    return Cluster(plan, patches or {}).run()


def shortest(plan: Plan, patches: Patches | None = None) -> Result:
    """Take faults away as long as the job still breaks a promise, and return the last one."""
    result = simulate(plan, patches)
    while result.problem:
        for index in range(len(plan.faults)):
            fewer = replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
            found = simulate(fewer, patches)
            if found.problem:
                plan, result = fewer, found
                break
        else:
            return result
    return result
