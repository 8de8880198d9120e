"""Start and stop the workers of an elastic job on Ray: actors on nodes that the driver chose.

`elastic_v2` makes a `NodeSet` for the driver of `horovod.runner.elastic`, which decides where
workers start and stop. Ray tells when an actor runs, ends or dies; that is reported to the driver
in the thread of its loop.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod.common.generations.membership import WORKER_ID
from horovod.common.joining.launcher_store import SECRET_KEY
from horovod.common.topology import Slot
from horovod.common.wire import encode_key
from horovod.ray.adapter import BaseParams, Executable, nics_of
from horovod.ray.cluster import (
    SILENT_SECONDS,
    describe_amounts,
    describe_room,
    free_by_node,
    kill,
)
from horovod.ray.coordinator import open_endpoints
from horovod.ray.ray_logger import StoreQueue
from horovod.ray.worker import ElasticWorker, WorkerEnd, WorkerInfo, own_versions
from horovod.runner.api import (
    Failure,
    HostSet,
    JobController,
    LaunchError,
    Mailbox,
    assignment_variables,
    list_some,
)

_LOOK_SECONDS = 1.0
"""Seconds between two looks at what the cluster has free."""

_TEXT_SECONDS = 30.0
"""Seconds for which the text about a wait stays, though the numbers in it may change."""

_KILL_SECONDS = 5.0
"""Seconds for Ray to end actors, after which the job does not wait for them any more."""


@dataclass
class ActorRequest:
    """Describes how any worker of a job is started."""

    settings: Any
    needs: BaseParams
    env: Mapping[str, str]
    executable: Executable
    call: Any  # the function, as a reference to an object in Ray


@dataclass
class _Node:
    name: str
    address: str
    id: str
    ready: bool = False


@dataclass
class _Worker:
    number: int
    node: _Node
    actor: Any
    info: Any  # a reference to its `WorkerInfo`
    call: Future[Any]  # what it does now: it joins the job, or runs the function
    is_working: bool = False
    is_killed: bool = False  # whether this process has killed it
    asked_at: float = field(default_factory=time.monotonic)


class NodeSet(HostSet):
    """The nodes that the driver uses, and all actors on them."""

    def __init__(
        self,
        request: ActorRequest,
        find_node: Callable[[str], Mapping[str, Any] | None],
        job: JobController,
    ) -> None:
        super().__init__()
        self.ends: list[WorkerEnd] = []
        self.died: dict[int, str] = {}  # what Ray said about a dead worker, by pid
        self._request = request
        self._find_node = find_node
        self._job = job
        self._endpoints = job.endpoints
        self._supervisor = job.supervisor
        self._nodes: dict[str, _Node] = {}
        self._workers: dict[int, _Worker] = {}
        self._closed = False
        self._obstacle = ""  # what was said last about workers that do not start
        self._waiting: list[str] = []  # the workers that this text is about
        self._next_look = 0.0  # when Ray is asked again
        self._next_text = 0.0  # when the text changes though the same workers wait
        self._mailbox = Mailbox()
        self._supervisor.watch(self._mailbox.descriptor, self._take)

    # -- nodes -----------------------------------------------------------------------------

    def want(self, names: Sequence[str]) -> dict[str, LaunchError]:
        problems = {}
        for name in names:
            if name in self._nodes or self._rests_now(name):
                continue
            found = self._find_node(name)
            if found is None:
                self.rest(name)
                problems[name] = LaunchError(
                    f"cannot start on {name}: Ray has no live node with that address, host name or "
                    f"id"
                )
                continue
            node = self._nodes[name] = _Node(
                name, str(found["NodeManagerAddress"]), str(found["NodeID"])
            )
            self._supervisor.call_later(0.0, lambda node=node: self._job.ready(node))  # type: ignore[misc]
        return problems

    def met(self, node: _Node) -> LaunchError | None:
        try:
            open_endpoints(self._endpoints, [node.address], nics_of(self._request.settings))
        except (RuntimeError, OSError) as error:
            return LaunchError(str(error))
        node.ready = True
        return None

    def let_go(self, name: str) -> None:
        self._nodes.pop(name, None)

    def names(self) -> list[str]:
        return list(self._nodes)

    def is_ready(self, name: str) -> bool:
        return name in self._nodes and self._nodes[name].ready

    def is_connecting(self, name: str) -> bool:
        return name in self._nodes and not self._nodes[name].ready

    def obeys(self, name: str) -> bool:
        return self._find_node(name) is not None

    # -- workers ---------------------------------------------------------------------------

    def start(self, name: str, worker: int, index: int, slots: int, place: Slot | None) -> None:
        node, request = self._nodes[name], self._request
        found = self._find_node(name)
        if found is None:
            problem = LaunchError("Ray has lost the node")
            self._supervisor.call_later(
                0.0, lambda: self._job.could_not_start(node, worker, problem)
            )
            return
        identity = str(found["NodeID"])
        actor = (
            ray.remote(ElasticWorker)
            .options(
                num_cpus=request.needs.cpus_per_worker,
                num_gpus=request.needs.gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(identity, soft=False),
            )
            .remote()
        )
        info = actor.describe.remote()
        if request.needs.use_gpu:
            # The worker's local rank will be its slot, unless others come or go before it begins.
            actor.share_gpus.remote(index, int(found["Resources"].get("GPU", 0)))
        settings = request.settings
        joined = actor.join.remote(
            {
                **request.env,
                "HOROVOD_ELASTIC": "1",
                WORKER_ID: f"w{worker}",
                "HOROVOD_HOSTNAME": identity,
                **assignment_variables(place),
                SECRET_KEY: encode_key(self._endpoints.key),
            },
            self._endpoints.question(nics_of(settings), settings.timeout_s),
        )
        call = self._when_done(joined, "joined", worker)
        self._workers[worker] = _Worker(worker, node, actor, info, call)

    def obstacle(self) -> str:
        """Return which workers wait for room on their node, and how much the cluster has.

        Ray is asked now and then; while the same workers wait, the text stays for a while.
        """
        now = time.monotonic()
        if now < self._next_look:
            return self._obstacle
        self._next_look = now + _LOOK_SECONDS
        names = self._crowded_out(now)
        if not names:
            self._obstacle = ""
        elif names != self._waiting or now >= self._next_text:
            self._obstacle, self._next_text = self._describe_wait(names), now + _TEXT_SECONDS
        self._waiting = names
        return self._obstacle

    def _crowded_out(self, now: float) -> list[str]:
        """Return the workers that have not started for a while because their node has no room."""
        starting = {w.info: w for w in self._workers.values() if not w.is_working}
        since = min((worker.asked_at for worker in starting.values()), default=now)
        if now - since < SILENT_SECONDS:
            return []
        needs, free = self._request.needs.resources, free_by_node()
        _, waiting = ray.wait(list(starting), num_returns=len(starting), timeout=0)
        return [
            f"w{starting[info].number}"
            for info in waiting
            if not _has_room(free.get(starting[info].node.id), needs)
        ]

    def _describe_wait(self, names: Sequence[str]) -> str:
        needs = self._request.needs.resources
        need = f"they need {describe_amounts(needs)} each"
        if len(names) == 1:
            need = f"it needs {describe_amounts(needs)}"
        room = describe_room(needs)
        return f"Ray has not started {list_some(names)}: {need}, and the cluster has {room}"

    def stop(self, name: str, worker: int, grace: float) -> None:
        found = self._workers.get(worker)
        if found is None:
            return
        if grace > 0 and found.is_working:
            self._supervisor.call_later(grace, lambda: self.stop(name, worker, 0.0))
        else:
            found.is_killed = True
            kill([found.actor])

    # -- what Ray says ---------------------------------------------------------------------

    def _when_done(self, reference: Any, kind: str, worker: int) -> Future[Any]:
        future: Future[Any] = reference.future()
        future.add_done_callback(lambda done: self._mailbox.post(kind, (worker, done)))
        return future

    def _take(self) -> None:
        for kind, (number, future) in self._mailbox.take_all():
            worker = self._workers.get(number)
            if worker is not None:
                (self._joined if kind == "joined" else self._ended)(worker, future)

    def _joined(self, worker: _Worker, future: Future[Any]) -> None:
        """Start the function in an actor that has reached the store; end one that has not."""
        if worker.is_killed:
            del self._workers[worker.number]
            self._job.exited(worker.node, [(worker.number, -signal.SIGKILL)])
            return
        error = future.exception()
        if error is None:
            info: WorkerInfo = ray.get(worker.info)
            problem = future.result() or _other_versions(info)
        else:
            problem = _first_line(error)
        if problem:
            del self._workers[worker.number]
            kill([worker.actor])
            self._job.could_not_start(worker.node, worker.number, LaunchError(f"it {problem}"))
            return
        self._job.started(worker.node, worker.number, info.pid)
        worker.actor.set_queue.remote(StoreQueue())
        done = worker.actor.work.remote(self._request.call, self._request.executable)
        worker.call, worker.is_working = self._when_done(done, "ended", worker.number), True

    def _ended(self, worker: _Worker, future: Future[Any]) -> None:
        end = self._end_of(worker, future)
        self.ends.append(end)
        del self._workers[worker.number]
        kill([worker.actor])
        self._job.exited(worker.node, [(worker.number, end.code)])

    def _end_of(self, worker: _Worker, future: Future[Any]) -> WorkerEnd:
        error = future.exception()
        if error is None:
            end: WorkerEnd = future.result()
            return end
        info: WorkerInfo = ray.get(worker.info)
        if isinstance(error, RayActorError):
            self.died[info.pid] = str(error)
            return WorkerEnd(-signal.SIGKILL)
        problem = f"what the function returned cannot be had here: {error}"
        return WorkerEnd(
            1, failure=Failure(None, info.hostname, info.pid, problem, str(error), None)
        )

    # -- the end ---------------------------------------------------------------------------

    def close(self, grace: float) -> None:
        """End all workers; those that run have `grace` seconds to end by themselves."""
        if self._closed:
            return
        self._closed = True
        self._supervisor.unwatch(self._mailbox.descriptor)
        working = [worker for worker in self._workers.values() if worker.is_working]
        wait([worker.call for worker in working], timeout=grace)
        self.ends += [self._end_of(worker, worker.call) for worker in working if worker.call.done()]
        kill(worker.actor for worker in self._workers.values())
        # Wait for their end before the store closes: they would complain that it is out of reach.
        wait([worker.call for worker in self._workers.values()], timeout=_KILL_SECONDS)
        self._workers.clear()
        self._mailbox.close()


def _other_versions(info: WorkerInfo) -> str:
    for package, version in own_versions().items():
        theirs = info.versions.get(package, "none")
        if theirs != version:
            return f"has {package} {theirs}, but the driver has {version}"
    return ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"failed: {type(error).__name__}: {' '.join(lines[:6])}"


def _has_room(free: Mapping[str, float] | None, needs: Mapping[str, float]) -> bool:
    """Return whether a node has room; true if Ray does not tell."""
    return free is None or all(free.get(name, 0.0) >= amount for name, amount in needs.items())
