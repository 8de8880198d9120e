"""Names of Horovod 0.28.1 around its elastic driver: notices, results, states of workers.

The driver's own notices come through the job's store (`horovod.common.membership`); with
`WorkerNotificationManager` a program may give notice of others.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

from horovod.runner._upstream.table import REFUSED, refuse
from horovod.runner.elastic.discovery import HostUpdateResult
from horovod.runner.elastic.termination import RESET_LIMIT_EXCEEDED_MESSAGE

__all__ = ["RESET_LIMIT_EXCEEDED_MESSAGE", "HostUpdateResult"]

READY = "READY"
SUCCESS = "SUCCESS"
FAILURE = "FAILURE"

GET_RANK_AND_SIZE = "rank_and_size"
PUT_WORKER_ADDRESSES = "worker_addresses"


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        return refuse(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass
class Results:
    """The end of a job: an error or None, and exit code and time by worker ("host[slot]")."""

    error_message: str | None
    worker_results: dict[str, tuple[int, float]]


class Listener(Protocol):
    """Receives notices; a `State` of ``hvd.elastic`` is one."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take notice that hosts have changed."""


@dataclass
class HostsUpdatedRequest:
    """Notice that hosts have changed, as upstream's driver sends it; nothing sends it here."""

    timestamp: float
    res: int = HostUpdateResult.no_update


class WorkerNotificationManager:
    """Notifies listeners that hosts have changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Do nothing: the driver's decisions come through the job's store."""

    def register_listener(self, listener: Listener) -> None:
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notify all listeners, which react at their next check."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)
