"""`ElasticRayExecutor`: the older interface for elastic jobs; new programs use `RayExecutor`.

Programs import `RayHostDiscovery` and `TestDiscovery` from here, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from horovod.ray.adapter import Callback, ElasticRaySettings
from horovod.ray.elastic_v2 import RayHostDiscovery, TestDiscovery
from horovod.ray.runner import RayExecutor

__all__ = ["ElasticRayExecutor", "RayHostDiscovery", "TestDiscovery"]


class ElasticRayExecutor:
    """An elastic job on Ray, by its older name.

    Deprecated: `RayExecutor(settings, min_workers=...)` does the same.

    Args:
        settings: Settings that `create_settings` made.
        use_gpu: Whether each rank gets GPUs. The default is False.
        cpus_per_slot: Number of CPUs that Ray reserves for each rank. The default is 1.
        gpus_per_slot: Number of GPUs of each rank, with `use_gpu`. The default is 1.
        env_vars: Environment variables for all workers.
        override_discovery: Whether to find the nodes by asking Ray, which is the default. False
            takes the hosts from `settings.discovery`.

    Raises:
        ValueError: `gpus_per_slot` is given without `use_gpu`, or is less than 1.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Collection[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticRaySettings:
        """Make the settings of an elastic job.

        Args:
            min_num_proc: Number of ranks below which the job waits. The default is 1.
            max_num_proc: Number of ranks up to which the job grows. By default it uses all that the
                cluster has room for.
            reset_limit: Number of changes of membership after which the job ends. By default there
                is no limit.
            elastic_timeout: Seconds for which the job waits for `min_num_proc` ranks. The default
                is 600.
            timeout_s: Seconds that the ranks may take to find each other once they run. The default
                is 30.
            ssh_identity_file: Accepted for compatibility and ignored: Ray starts the processes.
            nics: Names of the network interfaces to use between the nodes. By default every worker
                finds its way by itself.
            min_np: Deprecated name of `min_num_proc`.
            max_np: Deprecated name of `max_num_proc`.
            **kwargs: Further attributes of the settings, such as `discovery` and `cooldown_range`.

        Returns:
            Settings for `ElasticRayExecutor`.
        """
        for old, value in (("min_np", min_np), ("max_np", max_np)):
            if value is not None:
                warnings.warn(
                    f"{old} is deprecated; use {old[:3]}_num_proc", DeprecationWarning, stacklevel=2
                )
        return ElasticRaySettings(
            min_num_proc=min_np or min_num_proc,
            max_num_proc=max_np or max_num_proc,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            timeout_s=timeout_s,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            **kwargs,
        )

    def __init__(
        self,
        settings: ElasticRaySettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        warnings.warn(
            "ElasticRayExecutor is deprecated; use RayExecutor with min_workers",
            DeprecationWarning,
            stacklevel=2,
        )
        if gpus_per_slot is not None and not use_gpu:
            raise ValueError("gpus_per_slot is given, but use_gpu is not set")
        if gpus_per_slot is not None and gpus_per_slot < 1:
            raise ValueError(f"gpus_per_slot must be at least 1, not {gpus_per_slot}")
        self.settings = settings
        self._env_vars = dict(env_vars or {})
        self._executor = RayExecutor(
            settings,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
            elastic_timeout=settings.elastic_timeout,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            override_discovery=override_discovery,
        )

    def start(self) -> None:
        """Prepare the job. The workers start with `run`."""
        self._executor.start(extra_env_vars=self._env_vars)

    def run(
        self, worker_fn: Callable[[], Any], callbacks: Sequence[Callback] | None = None
    ) -> list[Any]:
        """Call a function on the workers and wait for what it returns.

        Args:
            worker_fn: Function without arguments, written for elastic training.
            callbacks: Functions that are called here, in a thread, with everything that workers
                pass to `ray_logger.log`.

        Returns:
            A list with what each worker that finished has returned, in the order of ranks.
        """
        return self._executor.run(worker_fn, callbacks=callbacks)
