"""An adapter on the cluster, for a process that reaches it through Ray Client.

Such a process may be anywhere, so the workers could not connect to it. The adapter therefore runs
in an actor; calls and results go through Ray. Callbacks are called in this process, which fetches
the messages from the actor.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from horovod.ray.adapter import Adapter, Callback, Executable
from horovod.ray.cluster import kill

_POLL_SECONDS = 0.2


class _AdapterActor:
    """Holds the adapter. One thread calls its methods, another hands out what was logged."""

    def __init__(self, kind: type[Adapter], settings: Any, params: Any) -> None:
        self._adapter = kind(settings, params)  # type: ignore[call-arg]
        self._logged: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._adapter, method)(*args)

    def execute_logged(self, fn: Callable[[Any], Any]) -> list[Any]:
        return self._adapter.execute(fn, [self._logged.put])

    def take_logged(self) -> list[Any]:
        messages = []
        while not self._logged.empty():
            messages.append(self._logged.get())
        return messages


class RemoteAdapter(Adapter):
    """Passes everything on to an adapter on the cluster."""

    def __init__(self, kind: type[Adapter], settings: Any, params: Any) -> None:
        actor = ray.remote(_AdapterActor).options(num_cpus=0, max_concurrency=2)
        self._actor = actor.remote(kind, settings, params)

    def _call(self, method: str, *args: Any) -> Any:
        return _get(self._actor.call.remote(method, *args))

    def start(self, executable: Executable, env: Mapping[str, str]) -> None:
        try:
            self._call("start", executable, env)
        except BaseException:
            kill([self._actor])
            raise

    def execute_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        return list(self._call("execute_remote", fn))

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None
    ) -> list[Any]:
        if not callbacks:
            return list(self._call("execute", fn))
        result = self._actor.execute_logged.remote(fn)
        done: list[Any] = []
        while not done:
            done, _ = ray.wait([result], timeout=_POLL_SECONDS)
            for message in ray.get(self._actor.take_logged.remote()):
                for callback in callbacks:
                    callback(message)
        return list(_get(result))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        return self._call("execute_single", fn)

    def shutdown(self) -> None:
        self._call("shutdown")
        kill([self._actor])


def _get(result: Any) -> Any:
    """Return the result, or raise the adapter's exception as itself."""
    try:
        return ray.get(result)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception):
            raise cause from error
        raise
