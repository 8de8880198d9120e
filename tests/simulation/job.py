"""One simulated job: made from a seed, run to its end, and checked while it runs.

`Plan.from_seed` draws a cluster, a training and faults; `simulate` runs it and returns a `Result`.
What is checked, after every event that it speaks of:

- ranks of a generation have the same model at the same step, run the same number of operations in
  it, and get the same results, which are right; with process sets, and when some have joined;
- a worker never goes back behind a commit that was announced to it, and what was committed gets
  lost only with a worker that has it: not when all of them leave in order; a commit that was
  announced to be on disk is not even lost with all workers and the power of the disk;
- no generation has fewer workers than the minimum, and without faults there is one, with all;
- no thread ends with an error, and no worker with one that does not say that it cannot go on, or
  with a status that blames its program;
- nobody commits in a generation when a newer one has committed;
- the model of an epoch's end has seen every sample once, and at most as many twice as the sampler
  repeats to give all ranks equally many;
- all workers that finish have the same model;
- no two workers of a host have the same device, and no thread spins;
- what `deadlines` says about time;
- the job ends well within `Plan.patience` seconds after the last fault is over, and leaves no
  process behind.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from horovod.common.generations.decisions import DRIVER_LOST
from horovod.common.topology import Topology
from tests.simulation.deadlines import Deadlines
from tests.simulation.disk import Disk
from tests.simulation.hand_over import HandOver
from tests.simulation.modules import Patches, library
from tests.simulation.network import Network
from tests.simulation.plan import (
    AGENT_KINDS,
    EVERYWHERE,
    HAND_OVER,
    STOP_WHEN_READY,
    Fault,
    Plan,
    Result,
)
from tests.simulation.processes import Host, Process
from tests.simulation.programs import DriverTools, Tools, start_program
from tests.simulation.world import World

HEAD = "head"
_LONGEST_HANG = 900.0
_MOMENT = 1.0  # in which a worker that has handed over its state ends, whatever happens elsewhere
_OUT_OF_REACH = frozenset(
    (
        *("cut", "cut towards the launcher", "cut from the launcher", "cut from everything"),
        *("power loss", "kill the launcher", "interrupt the launcher"),
    )
)
_GHOST = "ghost"  # a host that discovery may offer and that is not there

_LOST_AGAIN = "all workers were lost again before they could begin"
_LEGITIMATE = (
    _LOST_AGAIN,
    "all workers have left, as they were told to",
    "had finished training, and then failed: lost with its host",
)
"""Problems with which a job may end though its hosts work again."""


class Cluster:
    """The job while it runs: hosts, what the driver and the workers are told, the checks."""

    driver = "tests.simulation.driver"

    def __init__(self, plan: Plan, patches: Patches) -> None:
        self.plan = plan
        self.world = World(plan.seed, library(patches))
        self.world.on_spin = self.breach
        self.network = Network(self.world)
        self.network.start_program = partial(start_program, self)
        self.disk = Disk(self.world.random) if plan.uses_disk else None
        self._step_on_disk = 0  # the newest that was announced to be there
        self._outage: Fault | None = None  # that comes with the next one
        self.hosts: dict[str, Host] = {}
        self.broken = ""
        self.status: int | None = None
        self.ending = ""
        self.blamed: list[int] = []  # ranks that a job with fixed ranks takes for the cause
        self.workers: dict[str, Process] = {}
        self._offered = dict.fromkeys(plan.host_names, plan.slots)
        self._hidden: dict[str, float] = {}  # hosts that are not offered, until when
        self._until: dict[str, float] = {}  # how long something is wrong with discovery
        self._phase = "starting"
        self.hanging: list[Process] = []  # stopped for good, or their program
        self._unheard: list[Process] = []  # agents that were stopped before their first word
        self._told: set[str] = set()  # workers that were told to leave, and do so even if last
        self._given_up: set[str] = set()  # workers that are lost, as the launcher says
        self._last_lost = ""  # of these
        self._placed: dict[int, set[str]] = {}  # workers by decision
        self._known_to_have_met: set[str] = set()  # workers of which the launcher has heard it
        self._stops: list[Fault] = []  # of workers that will be ready
        self.trained: set[str] = set()  # workers that have been in a generation
        self.moments: list[tuple[str, str]] = []
        self.decisions: list[str] = []
        self._holders: dict[int, set[str]] = {}  # who has had the state of a commit, by step
        self._losses: list[tuple[str, list[Process]]] = []  # who began behind whose state
        self._values: dict[tuple[str, str, int], Any] = {}
        self._newest_commit = 0  # the newest decision in whose generation something was committed
        self.commits: dict[str, int] = {}  # the last announced step, by worker
        self.formed: set[str] = set()
        self._devices: dict[str, int] = {}  # by worker
        self._device_owners: dict[tuple[str, str, int], Process] = {}
        self.finished: dict[str, Any] = {}
        self.deadlines = Deadlines(self)
        self.hand_over = HandOver(self)
        for name in dict.fromkeys((HEAD, *self._offered, _GHOST)):
            self.hosts[name] = Host(name, self.network)
        self.hosts[_GHOST].lose_power()
        for fault in plan.faults:
            self.world.later(fault.start, partial(self._begin, fault))

    def run(self) -> Result:
        """Run to the end, and until nothing is left."""
        result = Result(self.plan, events=self.world.events)
        tools = DriverTools(self)
        driver = self.launcher = Process(
            self.hosts[HEAD],
            "horovodrun",
            lambda modules: modules.load(self.driver).main(),
            {},
            tools,
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
            result.moments, result.decisions = self.moments, self.decisions
            self.world.close()
            if self.disk is not None:
                self.disk.remove()
        return result

    def _check_end(self, driver: Process) -> None:
        if not driver.is_gone:
            waits = {
                str(process): [
                    f"{task.name}: {task.describe_wait()}"
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
        # Who is lost while others have finished may have had something left to do: a failure.
        elif self.status != 0 and not self.finished and not self._may_end_so():
            self.breach(f"the job failed with status {self.status}: {self.ending!r}")
        if _LOST_AGAIN in self.ending and self._last_lost in self._known_to_have_met:
            self.breach(f"{self.ending}: {self._last_lost} had met others, as the launcher knew")
        self.deadlines.check_end(self.status, self.ending)
        for loss in self._losses:
            self._check_loss(*loss)
        # A worker that has finished out of the launcher's reach counts as lost, with its model.
        known = [each for name, each in self.finished.items() if name not in self._given_up]
        if any(each != known[0] for each in known):
            self.breach(f"workers finished with different models: {self.finished}")
        if any(epoch != self.plan.epochs for epoch, *_ in self.finished.values()):
            self.breach(f"workers finished before the last epoch's end: {self.finished}")
        if not self.plan.faults and len(self.formed) != 1:
            self.breach(f"there were {len(self.formed)} generations, though nothing went wrong")
        if self.status == 0 and not self.finished:
            self.breach("the job ended well though nobody has finished")
        self._wake_unheard_agents()
        self.world.run(lambda: not any(p for p in self._left()), 180.0)
        if self._left():
            self.breach(f"left behind: {', '.join(map(str, self._left()))}")

    def _may_end_so(self) -> bool:
        return any(each in self.ending for each in _LEGITIMATE)

    def _left(self) -> list[Process]:
        return [process for host in self.hosts.values() for process in host.processes]

    def breach(self, problem: str) -> None:
        """Note that a promise does not hold."""
        self.broken = self.broken or problem
        self.world.has_changed = True
        self.world.note(f"BROKEN: {problem}")

    # -- faults -------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> None:
        names = sorted(self._offered)
        host = names[fault.target % len(names)]
        alive = [name for name in sorted(self.workers) if not self.workers[name].is_gone]
        worker = self.workers[alive[fault.target % len(alive)]] if alive else None
        target = worker if "worker" in fault.kind else host
        self.world.note(f"fault: {fault} ({target})")
        self.moments.append((self._phase, fault.kind))
        self.deadlines.take_fault(fault, host)
        later, network = self.world.later, self.network
        if fault.kind == "tell all workers to leave":
            for name in alive:
                self._tell_to_leave(self.workers[name])
        elif fault.kind == HAND_OVER:
            self.hand_over.arm(fault)
        elif fault.kind == STOP_WHEN_READY:
            self._stops.append(fault)
        elif fault.kind == "connections break":
            network.break_connections(self.hosts[host])
        elif fault.kind in AGENT_KINDS:
            self._hit_agent(fault, host)
        elif "worker" in fault.kind:
            if worker is None:
                return
            if fault.kind == "kill worker":
                worker.signal(signal.SIGKILL)
            elif fault.kind == "stop worker":
                self._stop(worker, fault)
            elif fault.kind != "tell worker to leave":
                self._let_hang(worker, fault.kind)
            else:
                self._tell_to_leave(worker)
        elif fault.kind == "power loss":
            self.hosts[host].lose_power()
            later(fault.seconds, self.hosts[host].boot)
        elif fault.kind == EVERYWHERE and fault.target % 2:
            self._outage = fault
        elif fault.kind == EVERYWHERE:
            self._lose_everything(fault)
        elif fault.kind.startswith("cut"):
            for pair in self._links_to_cut(fault, host):
                spares = fault.kind == "cut from the store"
                network.cut(*pair, spares_agents=spares)
                later(fault.seconds, partial(network.heal, *pair, spares_agents=spares))
        elif fault.kind == "slow network":
            network.set_delay(host, 0.3)
            later(fault.seconds, lambda: network.set_delay(host, 0.0))
        elif fault.kind.startswith("discovery"):
            self._until[fault.kind] = self.world.now + fault.seconds
        elif fault.kind == "host is not offered":
            self._hidden[host] = self.world.now + fault.seconds
        else:
            self.hosts[host].clock_offset += self.world.random.uniform(-3600, 3600)

    def _hit_agent(self, fault: Fault, host: str) -> None:
        """Kill or stop the agents of a host, which lives, as do its workers."""
        for agent in [each for each in self.hosts[host].processes if each.name.startswith("agent")]:
            agent.signal(signal.SIGKILL if fault.kind == "kill agent" else signal.SIGSTOP)
            if fault.kind == "stop agent":
                self.world.later(fault.seconds, partial(agent.signal, signal.SIGCONT))
            if not agent.handlers or any(map(self._may_cut_off_agents, self.plan.faults)):
                self._unheard.append(agent)

    def _may_cut_off_agents(self, fault: Fault) -> bool:
        """Return whether a fault may keep the launcher from ending what an agent has left."""
        is_between_hosts = fault.kind == "cut between hosts" and HEAD in self._offered
        return fault.kind in _OUT_OF_REACH or is_between_hosts

    def _wake_unheard_agents(self) -> None:
        """Let a person continue agents, after the job, that the launcher cannot end.

        It has never heard of them, cannot reach their host, or is gone itself. They must then end
        themselves and their workers.
        """
        for agent in self._unheard:
            agent.signal(signal.SIGCONT)

    def ends_cut_workers(self, fault: Fault) -> bool:
        """Return whether a fault cuts workers off from the launcher, so that they must end."""
        return fault.kind.startswith("cut") and fault.kind != "cut between hosts"

    def _stop(self, worker: Process, fault: Fault) -> None:
        """Stop a worker for a while."""
        worker.signal(signal.SIGSTOP)
        self.world.later(fault.seconds, lambda: worker.signal(signal.SIGCONT))

    def _tell_to_leave(self, worker: Process) -> None:
        self._told.add(worker.name)
        worker.signal(signal.SIGTERM)

    def _lose_everything(self, fault: Fault) -> None:
        assert self.disk is not None
        self.disk.lose_power()
        for name in sorted(self._offered):
            self.hosts[name].lose_power()
            self.world.later(fault.seconds, self.hosts[name].boot)

    def _let_hang(self, worker: Process, kind: str) -> None:
        """Stop a worker for good, or its program, if that can be noticed: by others who train."""
        others = [each for each in self.workers.values() if not each.is_gone and each is not worker]
        if worker.name in self.trained and any(each not in self.hanging for each in others):
            self.hanging.append(worker)
            if kind == "stop worker for good":
                worker.signal(signal.SIGSTOP)
            else:
                worker.hang()
            if self._phase == "ending":
                self._end_by_hand(worker)

    def _end_by_hand(self, worker: Process) -> None:
        """Let a person end a worker that hangs after its last step, when nobody waits for it."""
        self.world.later(_LONGEST_HANG, lambda: worker.signal(signal.SIGKILL))

    def _links_to_cut(self, fault: Fault, host: str) -> list[tuple[str, str]]:
        """Return from where to where nothing passes."""
        others = [name for name in self._offered if name != host]
        if fault.kind == "cut between hosts":
            other = others[fault.target // len(self._offered) % len(others)] if others else host
            return [(host, other), (other, host)][: 1 + fault.target % 2] if others else []
        pairs = [(host, HEAD)] * (fault.kind != "cut from the launcher")
        pairs += [(HEAD, host)] * (fault.kind != "cut towards the launcher")
        if fault.kind == "cut from everything":
            pairs += [pair for other in others for pair in ((host, other), (other, host))]
        return pairs

    def discover(self) -> dict[str, int]:
        """Return the hosts that the cluster offers now."""
        if self.world.now < self._until.get("discovery is late", 0.0):
            self.world.park("the cluster's answer", self.world.random.uniform(0.0, 30.0))
        if self.world.now < self._until.get("discovery fails", 0.0):
            raise RuntimeError("the cluster does not answer")
        now = self.world.now
        found = {
            host: slots for host, slots in self._offered.items() if self._hidden.get(host, 0) <= now
        }
        if now < self._until.get("discovery lies", 0.0):
            wrong = self.world.random.choice(sorted(self._offered))
            found[wrong] = self.world.random.randint(0, 2 * self.plan.slots)
            found[_GHOST] = 1
        return found

    def take_event(self, event: str, details: dict[str, Any]) -> None:
        """Learn from the driver's status where the job is."""
        self.deadlines.take_event(event, details)
        if event == "decision":
            self._phase = "waiting" if details["too_few"] else "forming"
            self.decisions.append(details["kind"] + " (too few)" * details["too_few"])
            self._placed[details["number"]] = set(details["workers"])
        elif event == "formed":
            self._phase = "training"
            self._known_to_have_met |= self._placed[details["decision"]]
        elif event == "failed":
            self._last_lost = details["worker"]
            self._given_up.add(self._last_lost)
        elif event == "ready" and self._stops:
            self._stop(self.workers[details["worker"]], self._stops.pop(0))
        elif event in ("done", "end"):
            self._phase = "ending"
            for worker in self.hanging:
                self._end_by_hand(worker)

    def make_tools(self, environ: Mapping[str, str]) -> WorkerTools:
        """Make what a worker with these variables may ask for."""
        return WorkerTools(self, environ["HOROVOD_WORKER_ID"])

    # -- checks -------------------------------------------------------------------------------

    def check_values(self, generation: str, what: str, number: int, value: Any, who: str) -> None:
        known = self._values.setdefault((generation, what, number), value)
        if known != value:
            self.breach(f"{what} {number} of {generation}, {who} has {value}, others {known}")

    def check_device(self, generation: str, worker: Process, local_rank: int) -> None:
        """Check that no two workers of a host have the same device: that of their first rank."""
        device = self._devices.setdefault(worker.name, local_rank)
        owner = self._device_owners.setdefault((generation, worker.host.name, device), worker)
        if owner is not worker:
            self.breach(f"{worker} has device {device}, as {owner.name} has")

    def note_commit(self, worker: str, decision: int, version: int, step: int) -> None:
        self.commits[worker] = step
        self._holders.setdefault(step, set()).add(worker)
        if decision < self._newest_commit:
            self.breach(
                f"{worker} committed step {step} in decision {decision}, after a commit in "
                f"decision {self._newest_commit}"
            )
        self._newest_commit = max(self._newest_commit, decision)

    def note_on_disk(self, step: int) -> None:
        self._step_on_disk = max(self._step_on_disk, step)
        fault, self._outage = self._outage, None
        if fault is not None:
            self.world.note("all hosts and the disk lose their power")
            self.world.later(0.001, lambda: self._lose_everything(fault))

    def note_received(self, worker: str, step: int) -> None:
        """Note that a worker has the state, before it begins: all ranks have it."""
        self._holders.setdefault(step, set()).add(worker)

    def check_begin(self, worker: str, step: int) -> None:
        if step < self._step_on_disk:
            self.breach(f"{worker} begins at step {step}, though {self._step_on_disk} was on disk")
        if step < self.commits.get(worker, 0):
            self.breach(f"{worker} begins at step {step}, behind its commit {self.commits[worker]}")
        self.commits[worker] = step  # all ranks have it, so it counts as one
        self.hand_over.take_begin(self.workers[worker])
        self._holders.setdefault(step, set()).add(worker)
        newest = max(self._holders)
        if step < newest:  # it is lost
            holders = [self.workers[name] for name in sorted(self._holders[newest])]
            begin = f"{worker} begins at step {step}, and step {newest}"
            excused = {each.name for each in self.hanging} | self._told | self._given_up
            living = [each.name for each in holders if not each.is_gone]
            if not excused.issuperset(living):
                self.breach(f"{begin} was the state of {', '.join(living)}, which still lives")
            self._check_loss(begin, holders)
            self._losses.append((begin, holders))  # some may live, and leave later
            self._holders = {at: who for at, who in self._holders.items() if at <= step}

    def _check_loss(self, begin: str, holders: list[Process]) -> None:
        """Check that not all workers that had a state have left in order, by themselves.

        Those that leave while others have it too have handed it over, also if these are lost later.
        """
        excused = self._told | self._given_up
        left = [each for each in holders if each.code == 0 and each.name not in excused]
        lost = max((each.ended for each in holders if each not in left), default=0.0)
        last = [each.name for each in left if each.ended > lost + _MOMENT]
        if last and all(each.is_gone for each in holders):
            self.breach(f"{begin} was the state of {', '.join(last)}, which ended in order")


class WorkerTools(Tools):
    """What a worker's program asks for, and tells."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster)
        self.name = name
        self._decision = 0
        self._generation = ""
        self._counts: Counter[str] = Counter()

    def digest(self, *values: Any) -> str:
        return hashlib.sha256(repr(values).encode()).hexdigest()[:12]

    def flip(self) -> bool:
        return self._cluster.world.random.random() < 0.5

    def shuffled(self, names: list[str]) -> list[str]:
        return self._cluster.world.random.sample(names, len(names))

    def breach(self, problem: str) -> None:
        self._cluster.breach(f"{self.name}: {problem}")

    def check_status(self, code: int) -> None:
        super().check_status(code)
        if code == DRIVER_LOST and self.name in self._cluster.trained:
            self._cluster.deadlines.check_lost_driver(self.process.host)

    def check_alike(self, what: str, value: Any) -> None:
        """Check that all ranks of the generation come here with the same value."""
        self._counts[what] += 1
        number = self._counts[what]
        self._cluster.check_values(self._generation, what, number, value, self.name)

    def check_epoch(self, seen: tuple[int, ...], most_ranks: int) -> None:
        counts = Counter(seen)
        missing = sorted(set(range(self.plan.samples)) - set(counts))
        repeated = sum(counts.values()) - len(counts)
        if missing or repeated >= most_ranks:
            self.breach(f"of an epoch samples {missing} were not seen, and {repeated} twice")

    def formed(self, decision: int, generation: str, topology: Topology) -> None:
        size = topology.size
        self.note(f"is rank {topology.rank} of {size} in decision {decision}")
        if size < self.plan.min_np and not self._cluster.finished:  # else the others finish alone
            self.breach(f"is one of {size}, fewer than {self.plan.min_np}")
        if not self.plan.faults and size != self.plan.num_proc:
            self.breach(f"is one of {size}, though nothing went wrong")
        if decision < self._decision:
            self.breach(f"went back to decision {decision}")
        self._decision, self._generation = decision, generation
        self._counts.clear()
        self._cluster.check_device(generation, self.process, topology.local_rank)
        self._cluster.formed.add(generation)
        self._cluster.trained.add(self.name)

    def received(self, step: int) -> None:
        self._cluster.note_received(self.name, step)

    def begins(self, version: int, step: int) -> None:
        self.note(f"begins at step {step}")
        self._cluster.check_begin(self.name, step)

    def committed(self, version: int, step: int) -> None:
        self._cluster.note_commit(self.name, self._decision, version, step)

    def on_disk(self, step: int) -> None:
        self.note(f"has step {step} on disk")
        self._cluster.note_on_disk(step)

    def finished(self, state: Any) -> None:
        self.note(f"has finished with {state}")
        self._cluster.finished[self.name] = state


def simulate(plan: Plan, patches: Patches | None = None) -> Result:
    """Run a job to its end, and return what came of it."""
    hook, is_collecting = sys.excepthook, gc.isenabled()
    gc.disable()  # it would look through all of torch, again and again
    try:
        module, name = plan.cluster
        cluster = getattr(importlib.import_module(module), name)
        modules = library(patches or {})
        count = -1
        while count < modules.count:  # in a job that loads modules they see a later time than else
            count = modules.count
            result: Result = cluster(plan, patches or {}).run()
            if patches:
                break  # mistakes on purpose need no digest
        return result
    finally:
        sys.excepthook = hook
        if is_collecting:
            gc.enable()
            gc.collect(1)


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
