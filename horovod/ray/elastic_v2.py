"""Elastic jobs on Ray: workers that come and go with nodes, and are replaced when they die.

`RayExecutor` uses the adapter when it is given ``min_workers``. Every call of a function is a job:
the driver of `horovod.runner.elastic` runs in the calling thread and starts the workers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import ray

from horovod.common.config import Config
from horovod.common.store import MemoryStore
from horovod.ray.adapter import Adapter, Callback, Executable
from horovod.ray.cluster import INTERRUPTED, require_ray, say
from horovod.ray.coordinator import watch
from horovod.ray.discovery import RayHostDiscovery, TestDiscovery
from horovod.ray.logs import Messages
from horovod.ray.node_set import ActorRequest, NodeSet
from horovod.ray.params import ElasticParams
from horovod.ray.settings import key_of
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
            request = ActorRequest(
                self.settings,
                params,
                {**self._variables(), **watcher.variables()},
                self._executable,
                ray.put(fn),
            )
            nodes = NodeSet(request, names.node_of, job)
            stack.callback(nodes.close, 0.0)
            manager = HostManager(
                discovery,
                None if params.cooldown_range is None else tuple(params.cooldown_range),  # type: ignore[arg-type]
                DEFAULT_WORKER_FAILURES,
            )
            status = Status(console, watcher=watcher)
            driver = Driver(job, nodes, self._limits(), manager, status)
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

    def _limits(self) -> Limits:
        params = self.params
        return Limits(
            num_proc=params.min_workers,
            min_np=params.min_workers,
            max_np=params.max_workers,
            reset_limit=params.reset_limit,
            elastic_timeout=params.elastic_timeout,
            start_timeout=self.settings.timeout_s,
            answer_timeout=Config.from_env().elastic_answer_timeout,
        )

    def _variables(self) -> dict[str, str]:
        return {
            "HOROVOD_START_TIMEOUT": f"{self.settings.timeout_s:g}",
            "HOROVOD_ELASTIC_TIMEOUT": f"{self.params.elastic_timeout:g}",
            "PYTHONUNBUFFERED": "1",
            **self._env,
        }

    def _raise(self, outcome: Outcome, nodes: NodeSet) -> None:
        outcome.problem = _in_words_of_ray(outcome.problem)
        first = outcome.first_failure
        if first is not None:
            said = nodes.died.get(first.pid, "")
            outcome.account = "\n".join(
                filter(
                    None,
                    [
                        outcome.problem,
                        f"rank {first.rank} on {first.host} (pid {first.pid}) failed: "
                        f"{first.describe()}",
                        said,
                    ],
                )
            )
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
