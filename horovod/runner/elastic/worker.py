"""Notices that hosts have changed, on a worker.

The driver's own come through the job's store (`horovod.common.membership`); here a program may give
notice of others.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from horovod.runner.common.unavailable import ELASTIC, unavailable
from horovod.runner.elastic.discovery import HostUpdateResult

__all__ = [
    "HostUpdateResult",
    "HostsUpdatedRequest",
    "WorkerNotificationClient",
    "WorkerNotificationManager",
    "WorkerNotificationService",
]


class Listener(Protocol):
    """Such as a `State` of ``hvd.elastic``."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have changed."""


@dataclass
class HostsUpdatedRequest:
    """Notice that hosts have changed, as upstream's driver sends it; nothing sends it here."""

    timestamp: float
    res: int = HostUpdateResult.no_update


class WorkerNotificationManager:
    """Tells listeners that hosts have changed."""

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
        """Nothing has to listen for the driver: its decisions come through the job's store."""

    def register_listener(self, listener: Listener) -> None:
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have changed: the listeners act on it at their next check."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


class WorkerNotificationService:
    """Not offered: the driver's notices come through the job's store, which has a key."""

    def __init__(self, key: bytes, nic: str | None, manager: WorkerNotificationManager) -> None:
        raise unavailable("WorkerNotificationService", *ELASTIC)


class WorkerNotificationClient:
    """Not offered: the driver's notices come through the job's store, which has a key."""

    def __init__(
        self, addresses: Mapping[str, Any], key: bytes, verbose: int, match_intf: bool = False
    ) -> None:
        raise unavailable("WorkerNotificationClient", *ELASTIC)
