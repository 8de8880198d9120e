"""Reserve placement groups for the workers of a static job, and start the actors in them.

`ColocatedStrategy` starts ``num_hosts`` x ``num_workers_per_host``, `PGStrategy` ``num_workers``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod.ray.adapter import BaseParams
from horovod.ray.cluster import SILENT_SECONDS, describe_amounts, describe_room, kill, say
from horovod.ray.worker import BaseHorovodWorker


class BaseStrategy(ABC):
    """Finds room for workers and starts them there."""

    def __init__(
        self,
        settings: Any,
        num_workers: int,
        use_gpu: bool = False,
        cpus_per_worker: int = 1,
        gpus_per_worker: int | None = None,
    ) -> None:
        self.settings = settings
        self.num_workers = num_workers
        self._needs = BaseParams(
            cpus_per_worker=cpus_per_worker, use_gpu=use_gpu, gpus_per_worker=gpus_per_worker
        )
        self._group: PlacementGroup | None = None
        self._created_placement_group: PlacementGroup | None = None  # the group, if it is ours
        self._workers: list[Any] = []

    @abstractmethod
    def create_workers(self) -> list[Any]:
        """Start the actors; they exist, but may not run yet."""

    @abstractmethod
    def describe(self) -> str:
        """Say in a few words which workers are asked for, for messages."""

    @property
    def wait_seconds(self) -> float:
        """How long Ray may take to find room, and then to start processes."""
        return float(self.settings.placement_group_timeout_s)

    def await_start(self, wait: Callable[[float], bool], seconds: float) -> None:
        """Wait for Ray, and say what is missing if it takes long.

        `wait` waits for some seconds, and returns whether Ray has done its part. If it has not
        after `seconds`, `TimeoutError` is raised.
        """
        first = min(SILENT_SECONDS, seconds)
        if wait(first):
            return
        if first < seconds:
            if self.settings.verbose:
                say(f"waiting up to {seconds:g} s for {self._missing()}")
            if wait(seconds - first):
                return
        raise TimeoutError(
            f"gave up after {seconds:g} s (placement_group_timeout_s) waiting for "
            f"{self._missing()}. Ask for less, wait for others to finish, or add nodes"
        )

    def _missing(self) -> str:
        if self._workers and self._created_placement_group is not None:
            return f"Ray to start the processes of {self.describe()}"
        room = describe_room(self._needs.resources)
        return f"room in the Ray cluster for {self.describe()}. The cluster has {room}"

    def shutdown(self) -> None:
        """End the workers, and give back the resources that we reserved for them."""
        workers, self._workers = self._workers, []
        kill(workers)
        group, self._created_placement_group = self._created_placement_group, None
        if group is not None and ray.is_initialized():
            remove_placement_group(group)

    def _reserve(self, bundle: Mapping[str, float], count: int, how: str) -> None:
        group = placement_group([dict(bundle) for _ in range(count)], strategy=how)
        self._group = self._created_placement_group = group
        try:
            # Ray counts whole seconds here.
            self.await_start(lambda seconds: group.wait(math.ceil(seconds)), self.wait_seconds)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, bundles: Sequence[int]) -> list[Any]:
        """Start one worker in each of these bundles; -1 leaves the choice to Ray."""
        for rank, bundle in enumerate(bundles):
            worker = ray.remote(BaseHorovodWorker).options(
                num_cpus=self._needs.cpus_per_worker,
                num_gpus=self._needs.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=bundle
                ),
            )
            self._workers.append(worker.remote(world_rank=rank, world_size=len(bundles)))
        return list(self._workers)


class ColocatedStrategy(BaseStrategy):
    """Starts the same number of workers on each of several nodes."""

    def __init__(
        self,
        *,
        settings: Any,
        num_hosts: int,
        num_workers_per_host: int = 1,
        use_gpu: bool = False,
        cpus_per_worker: int = 1,
        gpus_per_worker: int | None = None,
    ) -> None:
        super().__init__(
            settings, num_hosts * num_workers_per_host, use_gpu, cpus_per_worker, gpus_per_worker
        )
        self.num_hosts = num_hosts
        self.num_workers_per_host = num_workers_per_host

    def create_workers(self) -> list[Any]:
        count = self.num_workers_per_host
        bundle = {name: amount * count for name, amount in self._needs.resources.items()}
        self._reserve(bundle or {"CPU": 0.001}, self.num_hosts, "STRICT_SPREAD")
        return self._start([host for host in range(self.num_hosts) for _ in range(count)])

    def describe(self) -> str:
        return (
            f"{self.num_hosts} nodes with {self.num_workers_per_host} workers each, "
            f"{describe_amounts(self._needs.resources)} for each worker"
        )


class PGStrategy(BaseStrategy):
    """Starts workers on as few nodes as possible, or inside an existing placement group."""

    def __init__(
        self,
        *,
        settings: Any,
        num_workers: int,
        use_gpu: bool = False,
        cpus_per_worker: int = 1,
        gpus_per_worker: int | None = None,
        placement_group: PlacementGroup | None = None,
        force_create_placement_group: bool = False,
    ) -> None:
        super().__init__(settings, num_workers, use_gpu, cpus_per_worker, gpus_per_worker)
        if placement_group is not None and force_create_placement_group:
            raise ValueError("give placement_group or force_create_placement_group, not both")
        self._given = placement_group
        self._force = force_create_placement_group

    def create_workers(self) -> list[Any]:
        if not self._force:
            self._group = self._given or get_current_placement_group()
        if self._group is not None:
            return self._start([-1] * self.num_workers)
        bundle = self._needs.resources or {"CPU": 0.001}
        self._reserve(bundle, self.num_workers, "PACK")
        return self._start(range(self.num_workers))

    def describe(self) -> str:
        text = f"{self.num_workers} workers with {describe_amounts(self._needs.resources)} each"
        if self._group is None or self._created_placement_group is not None:
            return text
        bundles = ", ".join(describe_amounts(bundle) for bundle in self._group.bundle_specs)
        return f"{text} in the current placement group (its bundles: {bundles})"


def create_placement_group(
    resources_per_bundle: Mapping[str, float], num_bundles: int, pg_timeout: float, pg_strategy: str
) -> tuple[PlacementGroup, list[dict[str, float]]]:
    """Reserve room in the cluster, for programs that place jobs in a group of their own.

    Args:
        resources_per_bundle: Amounts of each bundle, such as ``{"CPU": 1}``.
        num_bundles: Number of bundles.
        pg_timeout: Seconds that Ray may take to find room.
        pg_strategy: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or ``STRICT_SPREAD``, as in Ray.

    Returns:
        The placement group and its bundles.

    Raises:
        TimeoutError: Ray found no room in time.
    """
    bundles = [dict(resources_per_bundle) for _ in range(num_bundles)]
    group = placement_group(bundles, strategy=pg_strategy)
    if not group.wait(math.ceil(pg_timeout)):
        remove_placement_group(group)
        raise TimeoutError(
            f"Ray did not find room within {pg_timeout:g} s for {num_bundles} bundles with "
            f"{describe_amounts(resources_per_bundle)} each. The cluster has "
            f"{describe_room(resources_per_bundle)}"
        )
    return group, bundles
