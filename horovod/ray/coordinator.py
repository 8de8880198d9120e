"""Number the ranks of a job on Ray, and serve the store through which they find each other.

The static adapter registers the workers that Ray has placed; the trainer for Ray Train does so for
its worker group. Ranks belong together by Ray's node id: several nodes may be on one host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from horovod.common.config import Config
from horovod.common.joining.addresses import LOOPBACK, is_loopback
from horovod.common.joining.launcher_store import SECRET_KEY, STORE_ADDRESS, STORE_PORT
from horovod.common.store import MemoryStore
from horovod.common.wire import encode_key
from horovod.observe.dashboard.watching import open_watcher
from horovod.ray.adapter import key_of, nics_of
from horovod.ray.cluster import say
from horovod.ray.worker import WorkerInfo, own_versions
from horovod.runner.api import Host, JobWatcher, StoreEndpoints, plan_slots, slot_variables


class Coordinator:
    """Numbers the ranks, and serves the job's store in this process until it is closed."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.endpoints = StoreEndpoints(key_of(settings))
        self._nodes: dict[str, list[int]] = {}  # ranks by node id
        self._hostnames: dict[str, str] = {}
        self._addresses: list[str] = []
        self._watcher = JobWatcher()

    @property
    def world_size(self) -> int:
        return sum(map(len, self._nodes.values()))

    @property
    def hoststring(self) -> str:
        """``NAME:RANKS`` of every node, with commas between them."""
        return ",".join(f"{self._hostnames[n]}:{len(ranks)}" for n, ranks in self._nodes.items())

    @property
    def node_id_string(self) -> str:
        """``NODE_ID:RANKS`` of every node, with commas between them."""
        return ",".join(f"{node}:{len(ranks)}" for node, ranks in self._nodes.items())

    def register(self, hostname: str, node_id: str, world_rank: int, address: str = "") -> None:
        """Note that a rank runs on a node; `address` is that of the node."""
        if any(world_rank in ranks for ranks in self._nodes.values()):
            raise ValueError(f"rank {world_rank} is registered twice")
        self._nodes.setdefault(node_id, []).append(world_rank)
        self._hostnames[node_id] = hostname
        if address and address not in self._addresses:
            self._addresses.append(address)

    def finalize_registration(self) -> dict[int, dict[str, str]]:
        """Return the environment variables that tell each rank its numbers in the job."""
        ranks = [rank for node in self._nodes.values() for rank in sorted(node)]
        hosts = [Host(node, len(ranks)) for node, ranks in self._nodes.items()]
        slots = zip(ranks, plan_slots(hosts, self.world_size), strict=True)
        found = {rank: slot_variables(replace(slot, rank=rank)) for rank, slot in slots}
        return dict(sorted(found.items()))

    def establish_rendezvous(self) -> dict[str, str]:
        """Serve the job's store where the nodes reach it; return the variables that say where.

        All ranks get the same ones: a rank that finds a better way (`request`) changes its own.
        """
        open_endpoints(self.endpoints, self._addresses or [LOOPBACK], nics_of(self.settings))
        address, port = self.endpoints.endpoints[0]
        return {
            STORE_ADDRESS: address,
            STORE_PORT: str(port),
            SECRET_KEY: encode_key(self.endpoints.key),
            "HOROVOD_START_TIMEOUT": f"{self.settings.timeout_s:g}",
        }

    def join(self, infos: Sequence[WorkerInfo], extra: Mapping[str, str]) -> list[dict[str, str]]:
        """Register the workers by rank and serve the store; return the variables of each rank."""
        check_versions(infos)
        self._watcher = watch(self.endpoints.store, {**os.environ, **extra})
        for rank, info in enumerate(infos):
            self.register(info.hostname, info.node_id, rank, info.address)
        common = {
            "MASTER_ADDR": infos[0].address,
            "MASTER_PORT": str(infos[0].free_port),
            "PYTHONUNBUFFERED": "1",
            **extra,
            **self._watcher.variables(),
            **self.establish_rendezvous(),
        }
        return [{**common, **own} for own in self.finalize_registration().values()]

    def request(self) -> dict[str, Any]:
        """Return what a worker's `join` needs to find its way to the store."""
        return self.endpoints.question(nics_of(self.settings), self.settings.timeout_s)

    def close(self) -> None:
        """End the job: close its store and its watcher."""
        self._watcher.close()
        self.endpoints.close()


def watch(store: MemoryStore, environ: Mapping[str, str], elastic: bool = False) -> JobWatcher:
    """Open the watcher of a job, such as its dashboard, as these environment variables say."""
    config = Config.from_env(environ)
    return open_watcher(config, environ, store, title="horovod.ray", say=say, elastic=elastic)


def open_endpoints(
    endpoints: StoreEndpoints, addresses: Sequence[str], nics: Sequence[str]
) -> None:
    """Serve the store at those addresses of this machine that lead to the nodes'."""
    if any(map(is_loopback, addresses)):
        endpoints.open(LOOPBACK)
    others = {address: ("", "") for address in addresses if not is_loopback(address)}
    problem = endpoints.open_towards(others, nics, "nics of the settings")
    if problem:
        raise RuntimeError(problem)


def check_versions(infos: Sequence[WorkerInfo]) -> None:
    """Raise `RuntimeError` if workers have other versions than their peers or this process."""
    own = own_versions()
    for info in infos:
        expected = {**infos[0].versions, "horovod": own["horovod"]}
        for package, version in expected.items():
            theirs = info.versions.get(package, "none")
            if theirs != version:
                where = "the driver" if package == "horovod" else "the node " + infos[0].address
                raise RuntimeError(
                    f"{where} has {package} {version}, but node {info.address} "
                    f"({info.hostname}, {info.node_id[:8]}) has {theirs}: install the same version "
                    f"on all nodes"
                )
