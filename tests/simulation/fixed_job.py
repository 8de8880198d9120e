"""One simulated job with fixed ranks, and what must hold for it.

- ranks get the same results at each step, and all of them take part in it;
- the job ends within `FixedPlan.patience` virtual seconds after the last fault is over;
- it ends with status 0 if, and only if, every rank has trained to its end, or a fault came later;
- a rank that ends with status 0 has trained to the end;
- the account names a rank that a fault has hit, and not a victim; and if a rank was killed or
  failed by itself before anything else went wrong, that rank and its status;
- after a rank has failed by itself, the job ends within 20 s, whatever the others do;
- nothing stays running on any host, also when the launcher is killed.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.simulation.fixed_plan import CUTS, FixedPlan
from tests.simulation.job import Cluster, WorkerTools
from tests.simulation.plan import AGENT_KINDS, Fault
from tests.simulation.processes import Process

_TOGETHER = 1.0
"""Seconds within which the order of failures on different hosts is not known to the launcher."""

_ENDING_SECONDS = 20.0
"""Within which a job has ended of which a rank has failed by itself, whatever the others do."""

_TIDY_SECONDS = 180.0


class Cause(NamedTuple):
    """Something that ends the job, perhaps."""

    when: float
    ranks: frozenset[int]  # that it hits
    status: int | None = None  # of the job, if that is certain


class FixedCluster(Cluster):
    """The job while it runs."""

    driver = "tests.simulation.fixed_driver"
    plan: FixedPlan

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.causes: list[Cause] = []
        self.interrupted_at: float | None = None

    def make_tools(self, environ: Mapping[str, str]) -> FixedTools:
        return FixedTools(self, f"rank {environ['HOROVOD_RANK']}")

    def note_cause(self, ranks: Any, status: int | None = None) -> None:
        if self.status is None:
            self.causes.append(Cause(self.world.now, frozenset(ranks), status))

    def ranks_on(self, *hosts: str) -> set[int]:
        """Return the ranks that the launcher starts on hosts, whether they run or not."""
        names, slots = self.plan.host_names, self.plan.slots
        return {
            rank
            for host in hosts
            if host in names
            for rank in range(slots * names.index(host), slots * names.index(host) + slots)
        }

    def take_event(self, event: str, details: dict[str, Any]) -> None:
        """The phases of such a job follow from what its ranks do."""

    @property
    def is_told_to_end(self) -> bool:
        """Whether somebody has ended the launcher, or asked it to end."""
        return self.interrupted_at is not None or self.launcher.is_gone

    # -- faults -------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> None:
        names = sorted(self.plan.host_names)
        host = names[fault.target % len(names)]
        alive = [name for name in sorted(self.workers) if not self.workers[name].is_gone]
        if fault.kind.endswith("the launcher") and not fault.kind.startswith("cut"):
            self.world.note(f"fault: {fault}")
            self.moments.append((self._phase, fault.kind))
            if fault.kind == "kill the launcher":
                self.launcher.signal(signal.SIGKILL)
            else:
                self.interrupted_at = self.interrupted_at or self.world.now
                self.launcher.signal(signal.SIGTERM)
            return
        if "worker" in fault.kind and alive:
            worker = self.workers[alive[fault.target % len(alive)]]
            if fault.kind == "worker fails":
                self.world.note(f"fault: {fault} ({worker})")
                self.moments.append((self._phase, fault.kind))
                worker.tools.fails = True
                return
            status = 137 if fault.kind == "kill worker" else None
            self.note_cause({worker.tools.rank}, status)
        elif fault.kind == "power loss" or fault.kind in AGENT_KINDS:
            self.note_cause(self.ranks_on(host))
        elif fault.kind in CUTS:
            pairs = self._links_to_cut(fault, host)
            self.note_cause(self.ranks_on(*{name for pair in pairs for name in pair}))
        super()._begin(fault)

    def ends_cut_workers(self, fault: Fault) -> bool:
        # Ranks that train do not need the store: only their agent notices that a link is cut.
        return super().ends_cut_workers(fault) and fault.kind != "cut from the store"

    def _let_hang(self, worker: Process, kind: str) -> None:
        if len(self.plan.host_names) * self.plan.slots > 1:  # nobody would notice
            super()._let_hang(worker, kind)

    # -- checks -------------------------------------------------------------------------------

    def _check_end(self, driver: Process) -> None:
        if not driver.is_gone:
            self.breach(f"the job has not ended {self.plan.patience:g} s after the last fault")
            return
        if driver.code == 0:
            self._check_status()
        elif driver.code not in (-signal.SIGKILL, -signal.SIGTERM):
            self.breach(f"the launcher ended with code {driver.code}")
        if len({str(each) for each in self.finished.values()}) > 1:
            self.breach(f"ranks finished with different models: {self.finished}")
        for name, worker in self.workers.items():
            if worker.code == 0 and name not in self.finished:
                self.breach(f"{name} ended with status 0, and has not trained to the end")
        self._wake_unheard_agents()
        rest = max(0.0, 1000.0 + self.plan.faults_end - self.world.now)
        self.world.run(lambda: not self._left(), rest + _TIDY_SECONDS)
        if self._left():
            self.breach(f"left behind: {', '.join(map(str, self._left()))}")

    def _check_status(self) -> None:
        status, has_all = self.status, len(self.finished) == self.plan.num_proc
        what = f"the job ended with status {status}: {self.ending!r}, blamed are {self.blamed}"
        if status == 0:
            if not has_all:
                self.breach(f"{what}, though only {sorted(self.finished)} have finished")
            return
        if self.interrupted_at is not None and status == 128 + signal.SIGTERM:
            return
        if not self.causes:
            if self.interrupted_at is None:
                self.breach(f"{what}, though nothing has happened to any rank")
            return
        first, *later = self.causes
        near = [cause for cause in later if cause.when < first.when + _TOGETHER]
        if first.status is None or any(not self._is_seen_later(cause, first) for cause in near):
            hit = frozenset().union(*(cause.ranks for cause in self.causes))
            if not hit.issuperset(self.blamed):
                self.breach(f"{what}, and only {sorted(hit)} were hit")
        elif len(self.plan.faults) == 1 and self.world.now > first.when + _ENDING_SECONDS:
            self.breach(f"{what}, {self.world.now - first.when:.1f} s after the first failure")
        elif self.interrupted_at is None and (
            (self.blamed, status) != (sorted(first.ranks), first.status)
        ):
            self.breach(f"{what}, and not {sorted(first.ranks)} with {first.status}")

    def _is_seen_later(self, cause: Cause, first: Cause) -> bool:
        """Return whether one agent sees both failures, in this order."""
        hosts = {rank // self.plan.slots for rank in (*cause.ranks, *first.ranks)}
        return cause.status is not None and len(hosts) == 1


class FixedTools(WorkerTools):
    """What a rank's program asks for, and tells."""

    _cluster: FixedCluster

    def __init__(self, cluster: FixedCluster, name: str) -> None:
        super().__init__(cluster, name)
        self.rank = int(name.split()[1])
        self.fails = False  # whether its program fails soon

    def formed(self, rank: int, size: int) -> None:  # type: ignore[override]
        cluster = self._cluster
        self.note(f"is rank {rank} of {size}")
        cluster.trained.add(self.name)
        if len(cluster.trained) == self.plan.num_proc:
            cluster.formed.add("all")
            cluster._phase = "training"
        if (rank, size) != (self.rank, self.plan.num_proc):
            self.breach(f"is rank {rank} of {size}")

    def finished(self, state: Any) -> None:
        super().finished(state)
        self._cluster._phase = "ending"

    def check_error(self, error: BaseException) -> None:
        """Check that an error says that others are the reason."""
        known = {each.__name__ for each in type(error).__mro__}
        if not known & {"HorovodInternalError", "TimeoutError", "ConnectionError"}:
            super().check_error(error)
        elif not self._cluster.causes and not self._cluster.is_told_to_end:
            self.breach(f"an error, though nothing has happened: {error}")

    def check_status(self, code: int) -> None:
        if code == 3 and self.fails:
            self._cluster.note_cause({self.rank}, 3)
        else:
            super().check_status(code)
