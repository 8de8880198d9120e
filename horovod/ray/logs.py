"""What workers log with `ray_logger`, taken from the job's store and passed to callbacks.

Used by both adapters while a function runs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from types import TracebackType

import cloudpickle

from horovod.common.logging import get_logger
from horovod.common.store import MemoryStore
from horovod.ray.adapter import Callback
from horovod.ray.ray_logger import COUNTER
from horovod.runner.api import take

_logger = get_logger(__name__)


class Messages:
    """The messages of one job, in the order in which they became complete."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        store.watch(self._notice)

    def _notice(self, key: str) -> None:
        first, _, number = key.partition("/")
        if first == COUNTER and number.isdecimal():  # not one of the pieces of a message
            self._names.put(key)

    def deliver(self, callbacks: Sequence[Callback] | None) -> Delivery:
        """While the result's `with` block runs, pass messages on to the callbacks."""
        return Delivery(self._store, self._names, callbacks or ())


class Delivery:
    """A thread that calls the callbacks: a slow one holds up neither the job nor its workers.

    At the end of the block all messages have been delivered. What a callback raises is logged at
    once, since the job may take days, and raised there, unless the block itself failed.
    """

    def __init__(
        self,
        store: MemoryStore,
        names: queue.SimpleQueue[str | None],
        callbacks: Sequence[Callback],
    ) -> None:
        for callback in callbacks:
            if not callable(callback):
                raise ValueError(f"callbacks must be callable, which {callback!r} is not")
        self._store = store
        self._names = names
        self._callbacks = callbacks
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="horovod-callbacks", daemon=True)

    def __enter__(self) -> Delivery:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._names.put(None)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _work(self) -> None:
        while (name := self._names.get()) is not None:
            content = take(self._store, name)
            if content is None or self._error is not None:
                continue
            try:
                message = cloudpickle.loads(content)
                for callback in self._callbacks:
                    callback(message)
            except BaseException as error:
                _logger.exception("a callback failed, and is not called any more")
                self._error = error
