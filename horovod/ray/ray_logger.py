"""Let a worker send messages to the driver while it runs, with ``horovod.ray.ray_logger.log``.

What a worker logs is passed to every callback of `RayExecutor.run` or `execute`, on the driver. It
travels through the job's own store: see `logs`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import cloudpickle

from horovod.common.joining.launcher_store import launchers_store
from horovod.common.logging import get_logger
from horovod.common.store import StoreClient
from horovod.runner.api import put

_logger = get_logger(__name__)

COUNTER = "logged"  # in the job's store: the number of messages; "logged/1" is the first
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
        number = self._store.add(COUNTER, 1)
        put(self._store, f"{COUNTER}/{number}", cloudpickle.dumps(item))


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
