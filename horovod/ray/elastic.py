"""`ElasticRayExecutor`: the older interface for elastic jobs; new programs use `RayExecutor`.

Also where programs import `RayHostDiscovery` and `TestDiscovery` from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from horovod.ray.adapter import Callback
from horovod.ray.discovery import RayHostDiscovery, TestDiscovery
from horovod.ray.runner import RayExecutor
from horovod.ray.settings import ElasticRaySettings

__all__ = ["ElasticRayExecutor", "RayHostDiscovery", "TestDiscovery"]


class ElasticRayExecutor:
    """An elastic job on Ray. Deprecated: ``RayExecutor(settings, min_workers=...)`` is the same."""

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
        """Settings for the constructor. ``min_np`` and ``max_np`` are older names."""
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
        """Prepare; the workers start with `run`."""
        self._executor.start(extra_env_vars=self._env_vars)

    def run(
        self, worker_fn: Callable[[], Any], callbacks: Sequence[Callback] | None = None
    ) -> list[Any]:
        """Call ``worker_fn()`` on the workers; what those that finished returned, by rank."""
        return self._executor.run(worker_fn, callbacks=callbacks)
