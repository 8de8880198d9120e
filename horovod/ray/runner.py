"""`RayExecutor`: start the ranks of a job on a Ray cluster and call functions on them.

Users call it from a driver, a notebook, a Tune trial, or through Ray Client, where the adapter runs
in an actor on the cluster and only calls and results travel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from horovod.ray.adapter import Adapter, BaseParams, Callback, MiniSettings, StaticParams
from horovod.ray.client import RemoteAdapter
from horovod.ray.cluster import require_ray, restore_sigterm, through_client
from horovod.ray.coordinator import Coordinator
from horovod.ray.elastic_v2 import ElasticAdapter, ElasticParams
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

    Choose one of three forms: `num_workers` places that many ranks on as few nodes as possible;
    `num_hosts` with `num_workers_per_host` places the same number of ranks on each of several
    nodes; `min_workers` makes an elastic job, which goes on when workers or nodes are lost.

    Args:
        settings: Settings that `create_settings` made. By default those with its defaults.
        num_workers: Number of ranks of a job of a fixed size.
        num_hosts: Number of different nodes to use, in place of `num_workers`.
        num_workers_per_host: Number of ranks on each of `num_hosts` nodes. The default is 1.
        cpus_per_worker: Number of CPUs that Ray reserves for each rank. The default is 1.
        use_gpu: Whether each rank gets GPUs. The default is False.
        gpus_per_worker: Number of GPUs of each rank, with `use_gpu`. The default is 1.
        use_current_placement_group: Whether ranks are placed in the placement group that this
            process runs in, if there is one. The default is True.
        min_workers: Number of ranks below which an elastic job waits. Giving it makes the job
            elastic.
        max_workers: Number of ranks up to which an elastic job grows. By default it uses all that
            the cluster has room for.
        reset_limit: Number of changes of membership after which an elastic job ends. By default
            there is no limit.
        cooldown_range: Shortest and longest time in seconds for which an elastic job starts no
            workers on a node where some have failed. By default such a node is not used again.
        elastic_timeout: Seconds for which an elastic job waits for `min_workers` ranks. The default
            is 600.
        override_discovery: Whether an elastic job finds its nodes by asking Ray, which is the
            default. False takes the hosts from `settings.discovery`.

    Raises:
        ValueError: The arguments contradict each other.

    Examples:
        >>> executor = RayExecutor(num_workers=4, use_gpu=True)
        >>> executor.start()
        >>> results = executor.run(train, args=[10])
        >>> executor.shutdown()
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
        """Make the settings of a job.

        Args:
            timeout_s: Seconds that the ranks may take to find each other once they run. The default
                is 30.
            ssh_identity_file: Accepted for compatibility and ignored: Ray starts the processes.
            ssh_str: Accepted for compatibility and ignored: Ray starts the processes.
            placement_group_timeout_s: Seconds that Ray may take to find room for the ranks. The
                default is 100.
            nics: Names of the network interfaces to use between the nodes. By default every worker
                finds its way by itself.

        Returns:
            Settings for `RayExecutor`.
        """
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
        for name, value in (("num_workers", num_workers), ("num_hosts", num_hosts)):
            if min_workers is not None and value is not None:
                raise ValueError(
                    f"Both `min_workers` and `{name}` provided. Give `min_workers` for an elastic "
                    f"job, or `{name}` for a job of a fixed size"
                )
        self.settings = self.create_settings() if settings is None else settings
        self.adapter: Adapter | None = None
        self.params: StaticParams | ElasticParams
        needs: dict[str, Any] = {
            "cpus_per_worker": cpus_per_worker,
            "use_gpu": use_gpu,
            "gpus_per_worker": gpus_per_worker,
        }
        if min_workers is not None:
            self.params = ElasticParams(
                **needs,
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
            )
        else:
            self.params = StaticParams(
                **needs,
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
        """Start the workers. Those of an elastic job start with each function.

        Args:
            executable_cls: Class of which every worker makes an object; `execute` passes it to its
                functions. By default there is none.
            executable_args: Positional arguments of that class.
            executable_kwargs: Keyword arguments of that class.
            extra_env_vars: Environment variables for all workers, which do not inherit those of
                this process.

        Raises:
            RuntimeError: Ray is not running, the executor was started already, or the workers
                cannot reach each other.
            TimeoutError: Ray found no room for the workers.
        """
        require_ray()
        if self.adapter is not None:
            raise RuntimeError("this executor has been started: call shutdown() first")
        restore_sigterm()
        kind: type[Adapter] = (
            ElasticAdapter if isinstance(self.params, ElasticParams) else StaticAdapter
        )
        adapter: Adapter
        if through_client():
            adapter = RemoteAdapter(kind, self.settings, self.params)
        else:
            adapter = kind(self.settings, self.params)  # type: ignore[call-arg]
        env = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        adapter.start((executable_cls, executable_args, executable_kwargs), env)
        self.adapter = adapter

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        """Call a function on all ranks and wait for what it returns.

        An exception on one rank ends the function on all ranks, and is raised here as itself. Its
        cause is a `RemoteError` with the rank and the traceback.

        Args:
            fn: Function to call.
            args: Positional arguments for it.
            kwargs: Keyword arguments for it.
            callbacks: Functions that are called here, in a thread, with everything that workers
                pass to `ray_logger.log`.

        Returns:
            A list with what each rank returned, in the order of ranks.

        Raises:
            RuntimeError: `start` was not called.
            RemoteError: A worker died.
        """
        return self._running().execute(_as_call(fn, args, kwargs), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function on all ranks without waiting. It is not for elastic jobs.

        Args:
            fn: Function to call.
            args: Positional arguments for it.
            kwargs: Keyword arguments for it.

        Returns:
            A list with one ObjectRef for each rank.
        """
        return self._running().execute_remote(_as_call(fn, args, kwargs))

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None
    ) -> list[Any]:
        """Call a function with the object that each worker has made in `start`.

        Args:
            fn: Function of one argument, the worker's object.
            callbacks: Functions that are called here, in a thread, with everything that workers
                pass to `ray_logger.log`.

        Returns:
            A list with what each rank returned, in the order of ranks.
        """
        return self._running().execute(fn, callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with the object of rank 0, there alone. It is not for elastic jobs.

        Args:
            fn: Function of one argument, the worker's object.

        Returns:
            What the function returned.
        """
        return self._running().execute_single(fn)

    def shutdown(self) -> None:
        """End the workers, and give back the resources that they occupied; may be called twice."""
        adapter, self.adapter = self.adapter, None
        if adapter is not None:
            adapter.shutdown()

    def _running(self) -> Adapter:
        if self.adapter is None:
            raise RuntimeError("the workers are not running: call start() first")
        return self.adapter


def _as_call(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    """Return a function that ignores a worker's executable and calls ``fn(*args, **kwargs)``."""
    if not callable(fn):
        raise ValueError(f"a function is needed to call on the workers, not {fn!r}")
    positional, named = tuple(args or ()), dict(kwargs or {})
    return lambda executable: fn(*positional, **named)
