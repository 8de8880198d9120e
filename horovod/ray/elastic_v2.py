"""Elastic jobs on Ray: workers that come and go with nodes, and are replaced when they die.

`RayExecutor` uses the adapter when it is given ``min_workers``. Every call of a function is a job:
the driver of `horovod.runner.elastic` runs in the calling thread and starts the workers, on the
nodes that a `RayHostDiscovery` finds.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import ray

from horovod.common.config import Config
from horovod.common.logging import get_logger
from horovod.common.store import MemoryStore
from horovod.ray.adapter import Adapter, Callback, ElasticParams, Executable, key_of
from horovod.ray.cluster import INTERRUPTED, live_nodes, require_ray, say, slots_of
from horovod.ray.coordinator import watch
from horovod.ray.node_set import ActorRequest, NodeSet
from horovod.ray.ray_logger import Messages
from horovod.runner.api import (
    DEFAULT_WORKER_FAILURES,
    FAILURE_GRACE,
    Colour,
    Console,
    Driver,
    HostDiscovery,
    HostManager,
    JobController,
    Limits,
    Outcome,
    RemoteError,
    Status,
    raise_outcome,
)

__all__ = ["ElasticAdapter", "ElasticParams", "RayHostDiscovery", "TestDiscovery"]

_logger = get_logger(__name__)


class ElasticAdapter(Adapter):
    """A number of workers that may change while a function runs."""

    def __init__(self, settings: Any, params: ElasticParams) -> None:
        self.settings = settings
        self.params = params
        self._env: Mapping[str, str] = {}
        self._executable: Executable = (None, None, None)

    def start(self, executable: Executable, env: Mapping[str, str]) -> None:
        """Remember what workers need; they start when a function is called, and end with it."""
        self._executable, self._env = executable, env

    def execute_remote(self, fn: Any) -> NoReturn:
        raise NotImplementedError(
            "an elastic job has no workers to refer to before it ends: use run(), or num_workers "
            "instead of min_workers"
        )

    def execute_single(self, fn: Any) -> NoReturn:
        raise NotImplementedError(
            "an elastic job has no fixed rank 0: use execute(), or num_workers instead of "
            "min_workers"
        )

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None
    ) -> list[Any]:
        """Call the function on all workers; return the results of those that finished, by rank."""
        require_ray()
        params = self.params
        discovery, names = self._discovery()
        with ExitStack() as stack:
            console = _Console(self.settings.verbose)
            store = MemoryStore()
            watcher = stack.enter_context(watch(store, {**os.environ, **self._env}, elastic=True))
            job = stack.enter_context(
                JobController(console, store=store, key=key_of(self.settings), watcher=watcher)
            )
            messages = Messages(store)
            env = {
                "HOROVOD_START_TIMEOUT": f"{self.settings.timeout_s:g}",
                "HOROVOD_ELASTIC_TIMEOUT": f"{params.elastic_timeout:g}",
                "PYTHONUNBUFFERED": "1",
                **self._env,
                **watcher.variables(),
            }
            request = ActorRequest(self.settings, params, env, self._executable, ray.put(fn))
            nodes = NodeSet(request, names.node_of, job)
            stack.callback(nodes.close, 0.0)
            manager = HostManager(
                discovery,
                None if params.cooldown_range is None else tuple(params.cooldown_range),  # type: ignore[arg-type]
                DEFAULT_WORKER_FAILURES,
            )
            limits = Limits(
                num_proc=params.min_workers,
                min_np=params.min_workers,
                max_np=params.max_workers,
                reset_limit=params.reset_limit,
                elastic_timeout=params.elastic_timeout,
                start_timeout=self.settings.timeout_s,
                answer_timeout=Config.from_env().elastic_answer_timeout,
            )
            driver = Driver(job, nodes, limits, manager, Status(console, watcher=watcher))
            with messages.deliver(callbacks):
                outcome = job.run(nodes, driver)
                ended_badly = outcome.problem or outcome.first_failure
                nodes.close(FAILURE_GRACE if ended_badly else 0.0)
                watcher.ended(outcome)
        if outcome.interrupted:
            say(INTERRUPTED)
        self._raise(outcome, nodes)
        finished = [end for end in nodes.ends if end.finished]
        if any(end.rank is None for end in finished):
            raise RemoteError(
                "the function ended on a worker that has no rank: in an elastic job it must call "
                "init(), which waits for the others and gives it one"
            )
        return [end.value for end in sorted(finished, key=lambda end: end.rank or 0)]

    def shutdown(self) -> None:
        """Do nothing: nothing is left after a function has ended."""

    def _discovery(self) -> tuple[HostDiscovery, RayHostDiscovery]:
        """Return the source of hosts, and the discovery that finds the node of a host's name."""
        params = self.params
        rays = RayHostDiscovery(params.use_gpu, params.cpus_per_worker, params.gpus_per_worker)
        if params.override_discovery:
            return rays, rays
        given = getattr(self.settings, "discovery", None)
        if given is None:
            raise ValueError("override_discovery is False, but settings.discovery is not set")
        return given, given if isinstance(given, RayHostDiscovery) else rays

    def _raise(self, outcome: Outcome, nodes: NodeSet) -> None:
        outcome.problem = _in_words_of_ray(outcome.problem)
        first = outcome.first_failure
        if first is not None:
            who = f"rank {first.rank} on {first.host} (pid {first.pid})"
            told = f"{who} failed: {first.describe()}", nodes.died.get(first.pid, "")
            outcome.account = "\n".join(filter(None, (outcome.problem, *told)))
        raise_outcome([end.failure for end in nodes.ends if end.failure is not None], outcome)


class _Console(Console):
    """Writes the driver's messages to where Python's stderr goes, which may be a notebook."""

    def __init__(self, verbose: int) -> None:
        super().__init__()
        self.disable_bars()
        self._verbose = verbose

    def say(self, text: str, colour: Colour = Colour.PLAIN) -> None:
        if self._verbose:
            for line in _in_words_of_ray(text).splitlines():
                say(line)


def _in_words_of_ray(text: str) -> str:
    """Replace the options of horovodrun in a text by the names of our arguments."""
    return re.sub(r"--([a-z]+(-[a-z]+)*)", lambda found: found[1].replace("-", "_"), text)


class RayHostDiscovery(HostDiscovery):
    """The live nodes of the cluster, each with as many slots as it has room for workers.

    A host's name is its node's address, as with Ray itself; of several nodes with one address, all
    but the first have a part of their id in the name.

    Args:
        use_gpu: Whether each worker needs GPUs. The default is False.
        cpus_per_slot: Number of CPUs of each worker. The default is 1.
        gpus_per_slot: Number of GPUs of each worker, with `use_gpu`. The default is 1.
    """

    def __init__(
        self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int | None = 1
    ) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_slot = cpus_per_slot
        self.gpus_per_slot = gpus_per_slot or 1
        self._names: dict[str, str] = {}  # hosts' names by node id

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots of each live node, by its name."""
        needs = {"CPU": float(self.cpus_per_slot)}
        if self.use_gpu:
            needs["GPU"] = float(self.gpus_per_slot)
        found = {}
        for name, node in self._live().items():
            slots = slots_of(node, needs)
            if slots:
                found[name] = slots
        return found

    def node_of(self, name: str) -> Mapping[str, Any] | None:
        """Return the live node with a name, as Ray describes it; None if there is none.

        Args:
            name: Name, address, host name or id of the node, or ``NAME`` of a resource
                ``node:NAME`` that the node has: so a node can stand for several hosts.
        """
        nodes = self._live()
        if name in nodes:
            return nodes[name]
        for node in nodes.values():
            names = (node.get("NodeID"), node.get("NodeManagerHostname"))
            if name in names or f"node:{name}" in node.get("Resources", {}):
                return node
        return None

    def _live(self) -> dict[str, Mapping[str, Any]]:
        nodes = {str(node.get("NodeID", node["NodeManagerAddress"])): node for node in live_nodes()}
        self._names = {node: name for node, name in self._names.items() if node in nodes}
        for identity, node in nodes.items():
            address = str(node["NodeManagerAddress"])
            taken = address in self._names.values()
            self._names.setdefault(identity, f"{address}#{identity[:8]}" if taken else address)
        return {self._names[identity]: node for identity, node in nodes.items()}


class TestDiscovery(RayHostDiscovery):
    """Pretends that nodes come and go, to try out a training function on a real cluster.

    Args:
        min_hosts: Number of hosts that always stay.
        max_hosts: Number of hosts that are shown at most.
        change_frequency_s: Seconds after which a random host goes, or one that was gone comes back.
        use_gpu: Whether each worker needs GPUs. The default is False.
        cpus_per_slot: Number of CPUs of each worker. The default is 1.
        gpus_per_slot: Number of GPUs of each worker, with `use_gpu`. The default is 1.
        verbose: Whether to log which hosts seem to be gone. The default is True.
        _graceful: Whether the first host always stays. The default is True.
    """

    __test__ = False  # not a test, whatever pytest makes of its name

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        self._min_hosts = min_hosts
        self._max_hosts = max_hosts
        self._seconds = change_frequency_s
        self._verbose = verbose
        self._graceful = _graceful
        self._hidden: list[str] = []
        self._last_change = time.monotonic()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots of each node that seems to be there, by its name."""
        found = super().find_available_hosts_and_slots()
        hidden = [host for host in self._hidden if host in found]
        shown = [host for host in found if host not in hidden]
        for host in shown[self._max_hosts :]:
            hidden.append(host)
        if time.monotonic() - self._last_change >= self._seconds:
            self._last_change = time.monotonic()
            self._change([host for host in found if host not in hidden], hidden)
        if self._verbose and hidden != self._hidden:
            _logger.warning("TestDiscovery: hosts that seem to be gone: %s", hidden or "none")
        self._hidden = hidden
        return {host: slots for host, slots in found.items() if host not in hidden}

    def _change(self, shown: list[str], hidden: list[str]) -> None:
        removable = shown[1:] if self._graceful else shown
        may_remove = len(shown) > self._min_hosts and bool(removable)
        may_add = len(shown) < self._max_hosts and bool(hidden)
        if may_add and (not may_remove or random.random() < 0.5):
            hidden.remove(random.choice(hidden))
        elif may_remove:
            hidden.append(random.choice(removable))
