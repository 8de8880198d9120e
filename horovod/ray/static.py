"""Run jobs with a fixed set of workers, which live from `start` to `shutdown`.

`RayExecutor` uses this. `strategy` finds room for workers and `coordinator` numbers them; then they
run one function after the other. A function that fails on one rank is ended on all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayTaskError

from horovod.common.exceptions import HorovodInternalError
from horovod.ray.adapter import Adapter, Callback, Executable, StaticParams
from horovod.ray.cluster import INTERRUPTED, kill, say
from horovod.ray.coordinator import Coordinator
from horovod.ray.ray_logger import Messages, StoreQueue
from horovod.ray.strategy import BaseStrategy, ColocatedStrategy, PGStrategy
from horovod.ray.worker import WorkerInfo
from horovod.runner.api import RemoteError

_GRACE = 5.0
"""Seconds for the other ranks to end by themselves after one has failed."""


class StaticAdapter(Adapter):
    """A fixed set of workers."""

    def __init__(self, settings: Any, params: StaticParams) -> None:
        self.settings = settings
        self.params = params
        self.workers: list[Any] = []  # in the order of ranks
        self._infos: list[WorkerInfo] = []
        self.strategy: BaseStrategy | None = None
        self._coordinator: Coordinator | None = None
        self._messages: Messages | None = None
        self._broken = ""  # why the workers cannot be used any more

    # -- start and end ---------------------------------------------------------------------

    def start(self, executable: Executable, env: Mapping[str, str]) -> None:
        self._broken = ""
        try:
            self._start(env)
            self._collect([worker.start_executable.remote(*executable) for worker in self.workers])
        except BaseException:
            self.shutdown()
            raise

    def _start(self, extra: Mapping[str, str]) -> None:
        strategy = self.strategy = self._make_strategy()
        workers = strategy.create_workers()
        described = [worker.describe.remote() for worker in workers]
        strategy.await_start(
            lambda seconds: not ray.wait(described, num_returns=len(workers), timeout=seconds)[1],
            strategy.wait_seconds + self.settings.timeout_s,
        )
        infos: list[WorkerInfo] = ray.get(described)
        # Ranks of a node are neighbours, in whatever order Ray has filled the nodes.
        nodes = list(dict.fromkeys(info.node_id for info in infos))
        order = sorted(range(len(infos)), key=lambda i: nodes.index(infos[i].node_id))
        self.workers = [workers[i] for i in order]
        self._infos = infos = [infos[i] for i in order]
        coordinator = self._coordinator = Coordinator(self.settings)
        variables = coordinator.join(infos, extra)
        self._messages = Messages(coordinator.endpoints.store)
        request = coordinator.request()
        refs = []
        for rank, worker in enumerate(self.workers):
            refs.append(worker.join.remote({**self._gpus(rank), **variables[rank]}, request))
            worker.set_queue.remote(StoreQueue())
        for rank, problem in enumerate(self._collect(refs)):
            if problem:
                raise RuntimeError(f"{self._who(rank)} {problem}")

    def _make_strategy(self) -> BaseStrategy:
        params = self.params
        needs: dict[str, Any] = {
            "settings": self.settings,
            "use_gpu": params.use_gpu,
            "cpus_per_worker": params.cpus_per_worker,
            "gpus_per_worker": params.gpus_per_worker,
        }
        if params.num_workers is None:
            assert params.num_hosts is not None, "checked by StaticParams"
            return ColocatedStrategy(
                num_hosts=params.num_hosts,
                num_workers_per_host=params.num_workers_per_host,
                **needs,
            )
        return PGStrategy(
            num_workers=params.num_workers,
            force_create_placement_group=not params.use_current_placement_group,
            **needs,
        )

    def _gpus(self, rank: int) -> dict[str, str]:
        """Show a rank all GPUs of the job on its node: its local rank is the index of its own."""
        if not self.params.use_gpu:
            return {}
        mine = self._infos[rank].node_id
        found = [gpu for info in self._infos if info.node_id == mine for gpu in info.gpu_ids]
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(found))}

    def shutdown(self) -> None:
        """End the workers; this may be called at any time, and twice."""
        strategy, self.strategy = self.strategy, None
        coordinator, self._coordinator = self._coordinator, None
        self.workers, self._infos, self._messages = [], [], None
        if strategy is not None:
            strategy.shutdown()
        if coordinator is not None:
            coordinator.close()

    # -- functions -------------------------------------------------------------------------

    def execute_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        self._require_started()
        call = ray.put(fn)
        return [worker.execute.remote(call) for worker in self.workers]

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None
    ) -> list[Any]:
        messages = self._require_started()
        with messages.deliver(callbacks):
            return self._collect(self.execute_remote(fn))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        self._require_started()
        return self._collect([self.workers[0].execute.remote(fn)])[0]

    def _require_started(self) -> Messages:
        if self._broken:
            raise RuntimeError(f"{self._broken}; call shutdown() and start() again")
        if self._messages is None:
            raise RuntimeError("the workers are not running: call start() first")
        return self._messages

    # -- results and failures --------------------------------------------------------------

    def _collect(self, refs: Sequence[Any]) -> list[Any]:
        """Wait for the calls and return their results; once one has failed, end the others."""
        values: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        waiting = {ref: rank for rank, ref in enumerate(refs)}
        deadline: float | None = None
        try:
            while waiting and (deadline is None or time.monotonic() < deadline):
                patience = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready, _ = ray.wait(list(waiting), num_returns=1, timeout=patience)
                for ref in ready:
                    rank = waiting.pop(ref)
                    try:
                        values[rank] = ray.get(ref)
                    except (RayTaskError, RayActorError) as error:
                        failures[rank] = error
                        deadline = deadline or time.monotonic() + _GRACE
        except BaseException:  # Ctrl-C, above all: nobody waits for the workers any more
            self._break("the function was interrupted", range(len(self.workers)))
            say(INTERRUPTED)
            raise
        if not failures:
            return [values[rank] for rank in range(len(refs))]
        dead = [rank for rank, error in failures.items() if isinstance(error, RayActorError)]
        if waiting or dead:
            self._break("a worker failed", [*waiting.values(), *dead])
        self._raise(failures)

    def _break(self, why: str, ranks: Sequence[int]) -> None:
        self._broken = f"{why}, and the workers of rank {', '.join(map(str, ranks))} were ended"
        kill(self.workers[rank] for rank in ranks)

    def _raise(self, failures: Mapping[int, Exception]) -> NoReturn:
        rank, error = min(failures.items(), key=lambda item: _guilt(item[1]))
        who = self._who(rank)
        if not isinstance(error, RayTaskError):
            raise RemoteError(f"{who} died: {error}", rank) from error
        text = str(error)
        remote = RemoteError(f"{who} failed\n\n{text}", rank, text)
        cause = error.cause
        if not isinstance(cause, Exception):
            raise remote from error
        raise cause from remote

    def _who(self, rank: int) -> str:
        info = self._infos[rank]
        return f"rank {rank} on {info.hostname} ({info.address}, pid {info.pid})"


def _guilt(error: Exception) -> int:
    """Rate an error, 0 for the likeliest cause: one about a lost peer follows from another."""
    if isinstance(error, RayActorError):
        return 0
    return 2 if isinstance(getattr(error, "cause", None), HorovodInternalError) else 1
