"""Promises of a simulated job about time, and about what the driver says of its workers.

`job` gives it every fault and every event of the driver's status file. It checks that

- a job begins with all the workers that it was offered, also if some hosts answer late;
- workers come to a decision within a step, or by their next commit if nobody was lost: at once
  after their generation has broken, and meet at once when the last of them has come;
- a stopped worker is given up `Limits.answer_timeout` seconds after a decision that it misses, and
  no worker is given up for want of an answer before it has been in the job for as long;
- a worker that cannot reach the launcher has ended after a minute, and none that has trained ends
  for that reason whose launcher is within reach;
- a worker that is lost after its training fails the job, and is named.

What is checked only holds where nothing else is wrong: links that are cut or slow, and workers that
are stopped, may cost any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.plan import Fault
from tests.simulation.processes import Host, Process

if TYPE_CHECKING:
    from tests.simulation.job import Cluster

_SHORT_CUT = 5.0  # seconds, which a job waits for a host before it begins
_MOMENT = 0.5
_ANSWER_SECONDS = (
    40.0  # until a stopped worker is killed: 30 s, and the launcher's word to its host
)
_FEWEST_ANSWER_SECONDS = 29.0
_OUT_OF_REACH_SECONDS = 60.0
_AFTERMATH = 15.0  # seconds after a fault of the network in which connections are still made anew


@dataclass
class _Change:
    """A decision whose workers have not met yet."""

    number: int
    decided: float
    seconds: float  # until they should have met
    num_faults: int  # that had begun
    workers: list[Process]
    left: dict[str, float]  # when a worker said that its generation is broken
    last_entered: float = 0.0


class Deadlines:
    """What is expected until when."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._faults: list[Fault] = []  # so far
        self._rough_until = 0.0  # until then the network may cost time
        self._within_reach: dict[str, float] = {}  # when each host reaches the launcher again
        self._stopped_at = 0.0  # when a worker was stopped for the last time
        self._decided: dict[int, set[str]] = {}  # the workers of each decision
        self._joined: dict[str, float] = {}  # when a worker's first decision was made
        self._formed: set[str] = set()  # those who have met last
        self._has_started = False
        self._has_ended = False
        self._waiting_since: float | None = None  # too few workers wait for others
        self._change: _Change | None = None
        self._done: set[str] = set()
        self._lost_after_training: list[str] = []

    # -- what happens -------------------------------------------------------------------------

    def take_fault(self, fault: Fault, host: str) -> None:
        """Take a fault, which begins now."""
        now = self._cluster.world.now
        self._faults.append(fault)
        if fault.kind.startswith("stop"):
            self._stopped_at = now + fault.seconds
        if fault.kind.startswith(("cut", "slow")) or fault.kind == "connections break":
            end = now + fault.seconds + _AFTERMATH
            self._rough_until = max(self._rough_until, end)
            if fault.kind != "connections break":  # others are made at once
                self._within_reach[host] = max(self._within_reach.get(host, 0.0), end)
        if self._cluster.ends_cut_workers(fault):
            look = partial(self._check_out_of_reach, host, now)
            self._cluster.world.later(_OUT_OF_REACH_SECONDS, look)

    def take_event(self, event: str, details: dict[str, Any]) -> None:
        """Take an event of the driver's status file."""
        worker = details.get("worker")
        if event == "decision":
            self._take_decision(details)
        elif event == "broken" and self._change is not None:
            if details["decision"] == self._change.number:
                self._change = None  # they try again, after a moment
            else:
                self._change.left[details["worker"]] = self._cluster.world.now
        elif event == "entered" and self._change is not None:
            self._take_entry(self._change, details)
        elif event == "formed":
            self._take_formed(details["decision"])
        elif event == "done":
            self._done.add(worker)
        elif event == "failed":
            self._take_failure(details["worker"], details["how"])
        elif event == "end":
            self._has_ended = True

    def _take_failure(self, worker: str, how: str) -> None:
        if worker in self._done:
            self._lost_after_training.append(worker)
        seconds = self._cluster.world.now - self._joined.get(worker, 0.0)
        if how.startswith("did not react") and seconds < _FEWEST_ANSWER_SECONDS:
            self._cluster.breach(f"{worker} is given up {seconds:.1f} s after it has joined: {how}")

    # -- changes ------------------------------------------------------------------------------

    def _take_decision(self, details: dict[str, Any]) -> None:
        cluster = self._cluster
        plan, now, kind = cluster.plan, cluster.world.now, details["kind"]
        workers = [cluster.workers[name] for name in details["workers"]]
        if not self._has_started and workers:
            self._has_started = True
            if all(map(_is_harmless, self._faults)) and len(workers) < plan.num_proc:
                cluster.breach(f"the job begins with {len(workers)} of {plan.num_proc} workers")
        for process in workers:
            if process.is_stopped and process in cluster.hanging:
                check = partial(self._check_given_up, process)
                cluster.world.later(_ANSWER_SECONDS, check)
        self._change = None
        if workers and not details["too_few"] and self._is_calm(workers):
            lost = details["lost"]
            breaks = kind == "failure" and (not lost or not self._formed.isdisjoint(lost))
            steps = 1 if breaks or kind == "start" else plan.commit_every
            seconds = steps * (1.5 * plan.pace + 0.1) + 1.0 + 3.0 * plan.uses_disk
            if self._waiting_since is not None and now > self._waiting_since + seconds:
                seconds = _MOMENT  # all have come, and waited for more workers
            count = len(cluster.moments)
            self._change = _Change(details["number"], now, seconds, count, workers, {})
        self._decided[details["number"]] = set(details["workers"])
        for name in details["workers"]:
            self._joined.setdefault(name, now)
        if not details["too_few"]:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def _take_formed(self, number: int) -> None:
        self._formed = self._decided[number]
        change, self._change = self._change, None
        if change is None or change.number != number or not self._has_been_calm(change):
            return
        now = self._cluster.world.now
        if now - change.decided > change.seconds:
            self._cluster.breach(
                f"the workers of decision {number} have met after {now - change.decided:.1f} s, "
                f"not {change.seconds:.1f}"
            )
        if now - change.last_entered > _MOMENT:
            seconds = now - change.last_entered
            self._cluster.breach(f"the workers of decision {number} needed {seconds:.2f} s to meet")

    def _take_entry(self, change: _Change, details: dict[str, Any]) -> None:
        now, worker = self._cluster.world.now, details["worker"]
        if details["decision"] != change.number:
            return
        change.last_entered = now
        left = change.left.pop(worker, now)
        seconds = now - max(left, change.decided)
        if seconds > _MOMENT and self._has_been_calm(change):
            self._cluster.breach(f"{worker} needed {seconds:.2f} s from one decision to the next")

    def _has_been_calm(self, change: _Change) -> bool:
        is_calm = self._is_calm(change.workers)
        return is_calm and change.num_faults == len(self._cluster.moments)

    def _is_calm(self, workers: list[Process]) -> bool:
        """Return whether nothing is wrong with the network and with these workers."""
        now, hanging = self._cluster.world.now, self._cluster.hanging
        return now > self._rough_until and not any(
            worker.is_gone or worker.is_stopped or worker in hanging for worker in workers
        )

    # -- workers that do not answer, or get no answer -----------------------------------------

    def _check_given_up(self, process: Process) -> None:
        now = self._cluster.world.now
        if not process.is_gone and now > self._rough_until + _ANSWER_SECONDS:
            self._cluster.breach(f"{process} is stopped and was not given up")

    def _check_out_of_reach(self, name: str, since: float) -> None:
        cluster = self._cluster
        host, head = cluster.hosts[name], cluster.hosts["head"]
        cut = [cluster.network.cut_since(*pair) for pair in ((host, head), (head, host))]
        if not any(start is not None and start <= since for start in cut):
            return  # it has reached the launcher meanwhile
        if host is head or self._stopped_at > since or self._has_ended:
            return
        for process in host.processes:
            is_worker = process.name in cluster.workers  # an agent goes when its connection does
            if is_worker and process.started <= since and process not in cluster.hanging:
                cluster.breach(
                    f"{process} cannot reach the launcher for {_OUT_OF_REACH_SECONDS:g} s, and runs"
                )

    def check_lost_driver(self, host: Host) -> None:
        """Check that a worker does not end for want of a launcher that it can reach."""
        now = self._cluster.world.now
        if now > self._within_reach.get(host.name, 0.0) and not self._has_ended:
            self._cluster.breach(f"a worker on {host.name} gives up a launcher within its reach")

    # -- the end ------------------------------------------------------------------------------

    def check_end(self, status: int | None, ending: str) -> None:
        """Check what the driver says at the end."""
        named = "had finished training, and then failed" in ending
        if self._lost_after_training and (status == 0 or not named):
            names = ", ".join(self._lost_after_training)
            self._cluster.breach(f"{names} failed after training, and the job says {ending!r}")


def _is_harmless(fault: Fault) -> bool:
    """Return whether a job begins with all workers in spite of a fault."""
    is_short_cut = fault.kind.startswith("cut") and fault.seconds <= _SHORT_CUT
    return is_short_cut or fault.kind in ("slow network", "clock jumps")
