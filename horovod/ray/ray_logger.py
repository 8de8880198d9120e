"""Let a worker send messages to the driver while it runs, with ``horovod.ray.ray_logger.log``.

What a worker logs is passed to every callback of `RayExecutor.run` or `execute`, on the driver. It
travels through the job's own store, from which both adapters take it with `Messages`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle

from horovod.common.joining.launcher_store import launchers_store
from horovod.common.logging import get_logger
from horovod.common.store import MemoryStore, StoreClient
from horovod.runner.api import put, take

_logger = get_logger(__name__)

_COUNTER = "logged"  # in the job's store: the number of messages; "logged/1" is the first
_CONNECT_SECONDS = 30.0

_queue: Any = None
_warned = False


class StoreQueue:
    """Puts messages into the job's store, where the driver takes them out."""

    def __init__(self) -> None:
        self._store: StoreClient | None = None

    def put(self, item: Any) -> None:
        if self._store is None:
            self._store = launchers_store(os.environ).connect(_CONNECT_SECONDS)
        number = self._store.add(_COUNTER, 1)
        put(self._store, f"{_COUNTER}/{number}", cloudpickle.dumps(item))


def configure(queue: Any) -> None:
    """Have `log` put messages into `queue`; None drops them."""
    global _queue
    _queue = queue


def log(info_dict: Mapping[str, Any]) -> None:
    """Pass a message from a worker to the callbacks on the driver.

    It warns once in a process that is no worker of a `RayExecutor`.

    Args:
        info_dict: The message, such as a dict of metrics. It must be possible to pickle it.
    """
    global _warned
    if _queue is not None:
        _queue.put(info_dict)
    elif not _warned:
        _warned = True
        _logger.warning(
            "ray_logger.log has nobody to tell: this process is not a worker of a RayExecutor"
        )


class Messages:
    """The messages of one job, in the order in which they became complete."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        store.watch(self._notice)

    def _notice(self, key: str) -> None:
        first, _, number = key.partition("/")
        if first == _COUNTER and number.isdecimal():  # not one of the pieces of a message
            self._names.put(key)

    @contextmanager
    def deliver(self, callbacks: Sequence[Callable[[Any], object]] | None) -> Iterator[None]:
        """Call the callbacks in a thread: a slow one holds up neither the job nor its workers.

        At the end of the block all messages have been delivered. An exception of a callback is
        logged at once, since the job may take days; it is raised at the end of the block, unless
        the block itself failed. The messages that come after it are dropped.
        """
        callbacks = callbacks or ()
        for callback in callbacks:
            if not callable(callback):
                raise ValueError(f"callbacks must be callable, which {callback!r} is not")
        errors: list[BaseException] = []

        def work() -> None:
            while (name := self._names.get()) is not None:
                content = take(self._store, name)
                if content is None or errors:
                    continue
                try:
                    message = cloudpickle.loads(content)
                    for callback in callbacks:
                        callback(message)
                except BaseException as error:
                    _logger.exception("a callback failed, and is not called any more")
                    errors.append(error)

        thread = threading.Thread(target=work, name="horovod-callbacks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._names.put(None)
            thread.join()
        if errors:
            raise errors[0]
