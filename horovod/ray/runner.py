"""`RayExecutor`: start the ranks of a job on a Ray cluster and call functions on them.

Users call it from a driver, a notebook, a Tune trial, or through Ray Client, where the adapter runs
in an actor on the cluster and only calls and results travel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from horovod.ray.adapter import Adapter, BaseParams, Callback
from horovod.ray.client import RemoteAdapter
from horovod.ray.cluster import require_ray, through_client
from horovod.ray.coordinator import Coordinator
from horovod.ray.elastic_v2 import ElasticAdapter, ElasticParams
from horovod.ray.params import StaticParams
from horovod.ray.settings import MiniSettings
from horovod.ray.static import StaticAdapter

__all__ = [
    "BaseParams",
    "Coordinator",
    "ElasticAdapter",
    "ElasticParams",
    "MiniSettings",
    "RayExecutor",
    "StaticAdapter",
    "StaticParams",
]


class RayExecutor:
    """Runs functions on the ranks of a Horovod job, which are Ray actors.

    ``num_workers``: so many ranks, on as few nodes as possible, or inside the placement group that
    this process runs in (``use_current_placement_group``). ``num_hosts`` with
    ``num_workers_per_host``: so many on each of so many nodes. ``min_workers``: an elastic job,
    which begins with that many, grows up to ``max_workers`` and lives on when workers or nodes are
    lost; ``reset_limit``, ``cooldown_range`` and ``elastic_timeout`` are horovodrun's, and
    ``override_discovery=False`` takes the hosts from ``settings.discovery``.

    Every rank gets ``cpus_per_worker`` CPUs and with ``use_gpu`` ``gpus_per_worker`` (1) GPUs.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Collection[str] | None = None,
    ) -> MiniSettings:
        """Settings for a job; see `MiniSettings`. What concerns ssh has no effect."""
        return MiniSettings(
            nics=nics,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if max_workers is not None and not (min_workers and min_workers > 0):
            raise ValueError("max_workers is for elastic jobs: give min_workers (at least 1) too")
        if min_workers is not None and (num_workers is not None or num_hosts is not None):
            raise ValueError(
                "min_workers is for elastic jobs, num_workers and num_hosts for others: give one"
            )
        self.settings = self.create_settings() if settings is None else settings
        self.adapter: Adapter | None = None
        self.params: StaticParams | ElasticParams
        if min_workers is not None:
            self.params = ElasticParams(
                cpus_per_worker=cpus_per_worker,
                use_gpu=use_gpu,
                gpus_per_worker=gpus_per_worker,
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
            )
        else:
            self.params = StaticParams(
                cpus_per_worker=cpus_per_worker,
                use_gpu=use_gpu,
                gpus_per_worker=gpus_per_worker,
                num_workers=num_workers,
                num_hosts=num_hosts,
                num_workers_per_host=num_workers_per_host,
                use_current_placement_group=use_current_placement_group,
            )

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers (an elastic job's start with its function).

        Each makes ``executable_cls(*executable_args, **executable_kwargs)``, which `execute` passes
        to its functions, and has ``extra_env_vars`` in its environment.
        """
        require_ray()
        if self.adapter is not None:
            raise RuntimeError("this executor has been started: call shutdown() first")
        kind: type[Adapter] = (
            ElasticAdapter if isinstance(self.params, ElasticParams) else StaticAdapter
        )
        adapter: Adapter
        if through_client():
            adapter = RemoteAdapter(kind, self.settings, self.params)
        else:
            adapter = kind(self.settings, self.params)  # type: ignore[call-arg]
        adapter.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)
        self.adapter = adapter

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on all ranks; what each returned, by rank.

        An exception on one rank ends the call on all; it is raised here as itself, with a
        `horovod.runner.functions.run_function.RemoteError` as its cause that has the rank and the
        traceback. ``callbacks`` are called, in a thread, with everything that `ray_logger.log` is
        given.
        """
        return self._running().run(fn, args, kwargs, callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Like `run`, but returns at once: an ObjectRef for each rank."""
        return self._running().run_remote(fn, args, kwargs)

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None
    ) -> list[Any]:
        """Call ``fn(executable)`` on all ranks; what each returned, by rank."""
        return self._running().execute(fn, callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0 alone; what it returned."""
        return self._running().execute_single(fn)

    def shutdown(self) -> None:
        """End the workers and give back what they occupied. May be called twice."""
        adapter, self.adapter = self.adapter, None
        if adapter is not None:
            adapter.shutdown()

    def _running(self) -> Adapter:
        if self.adapter is None:
            raise RuntimeError("the workers are not running: call start() first")
        return self.adapter
