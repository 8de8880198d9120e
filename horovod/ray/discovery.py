"""Offer the nodes of a Ray cluster as hosts of an elastic job.

`ElasticAdapter` polls a `RayHostDiscovery`. A host's name is its node's address, as with Ray
itself; of several nodes with one address, all but the first have a part of their id in the name.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from horovod.common.logging import get_logger
from horovod.ray.cluster import live_nodes, slots_of
from horovod.runner.api import HostDiscovery

_logger = get_logger(__name__)


class RayHostDiscovery(HostDiscovery):
    """The live nodes of the cluster, each with as many slots as it has room for workers.

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
