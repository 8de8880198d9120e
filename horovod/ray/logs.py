"""Take what workers log with `ray_logger` from the job's store, and pass it to callbacks.

Both adapters use this while a function runs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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

    @contextmanager
    def deliver(self, callbacks: Sequence[Callback] | None) -> Iterator[None]:
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
