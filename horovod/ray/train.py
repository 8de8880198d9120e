"""Horovod in Ray Train: `HorovodTrainer` and `HorovodConfig`, for Ray Train's v2 interface.

Ray Train starts the workers, restarts them after failures, and keeps checkpoints; the training loop
calls ``hvd.init()`` and uses Horovod between the workers. Ray Train's controller serves the job's
store for each group of workers that it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train import Result
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from horovod.common.wire import new_key
from horovod.ray.cluster import restore_sigterm
from horovod.ray.coordinator import Coordinator
from horovod.ray.worker import describe_worker, join, stop_engine

__all__ = ["HorovodConfig", "HorovodTrainer"]


@dataclass
class HorovodConfig(BackendConfig):
    """Configures how the workers of a `HorovodTrainer` find each other.

    Args:
        nics: Names of the network interfaces to use between the nodes. By default every worker
            finds its way by itself.
        verbose: Accepted for compatibility and ignored.
        key: Key that the ranks know each other by. By default a new one for each run.
        ssh_port: Accepted for compatibility and ignored: Ray Train starts the workers.
        ssh_identity_file: Accepted for compatibility and ignored: Ray Train starts the workers.
        ssh_str: Accepted for compatibility and ignored: Ray Train starts the workers.
        timeout_s: Seconds that the workers may take to find each other. The default is 300.
        placement_group_timeout_s: Accepted for compatibility and ignored: Ray Train finds room for
            the workers.
        env_vars: Environment variables for all workers. By default there are none. With
            ``HOROVOD_DASHBOARD`` among them, Ray Train's controller serves the job's live page, and
            its address is in the log.
    """

    nics: Collection[str] | None = None
    verbose: int = 1
    key: bytes | None = field(default=None, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    env_vars: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Backend]:
        return HorovodBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        return _stopping_the_engine

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that Ray Train may show, without the key."""
        return {"nics": sorted(self.nics or ()), "timeout_s": self.timeout_s}


@contextmanager
def _stopping_the_engine() -> Iterator[None]:
    """Stop the engine when the training loop ends, so that no other worker waits for this one."""
    try:
        yield
    finally:
        stop_engine()


class HorovodBackend(Backend):
    """Gives every worker of a group its rank; runs in Ray Train's controller."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._coordinator: Coordinator | None = None

    def on_start(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        self._close()
        if backend_config.key is None:
            backend_config.key = new_key()
        coordinator = self._coordinator = Coordinator(backend_config)
        infos = worker_group.execute(describe_worker)
        variables = coordinator.join(infos, backend_config.env_vars)
        request = coordinator.request()
        joined = [
            worker_group.execute_single_async(rank, join, own, request)
            for rank, own in enumerate(variables)
        ]
        for rank, problem in enumerate(ray.get(joined)):
            if problem:
                info = infos[rank]
                raise RuntimeError(f"rank {rank} on {info.hostname} ({info.address}) {problem}")

    def on_shutdown(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        self._close()

    def _close(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.close()


class HorovodTrainer(DataParallelTrainer):
    """Runs a training loop with Horovod on the workers of Ray Train.

    The loop calls `hvd.init()`, reports with `ray.train.report` and takes its data from
    `ray.train.get_dataset_shard`. A run goes on where it was if a trainer is made with the same
    name and storage path (`RunConfig`), or after a failure that `FailureConfig` allows: the loop
    finds the newest checkpoint with `ray.train.get_checkpoint()`.

    Args:
        train_loop_per_worker: Function that trains, with no argument or with `train_loop_config`.
        train_loop_config: Dict that is passed to the loop. By default the loop gets no argument.
        horovod_config: How the workers find each other. By default `HorovodConfig()`.
        **kwargs: Arguments of Ray Train's own trainers: `scaling_config`, `run_config`, `datasets`,
            `dataset_config`, `metadata` and others.

    Raises:
        ValueError: `horovod_config` is not a `HorovodConfig`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        horovod_config: HorovodConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if horovod_config is not None and not isinstance(horovod_config, HorovodConfig):
            raise ValueError(f"horovod_config must be a HorovodConfig, not {horovod_config!r}")
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=horovod_config or HorovodConfig(),
            **kwargs,
        )

    def fit(self) -> Result:
        """Train, and wait for the end.

        Returns:
            Ray Train's result: the newest checkpoint, its metrics, and where the run is stored.

        Raises:
            TrainingFailedError: The loop failed, more often than `FailureConfig` allows.
        """
        if not ray.is_initialized():
            ray.init()  # as Ray Train would: it takes the handler of SIGTERM away
        restore_sigterm()
        return super().fit()
